"""Metric families with one sample each, of the model that is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Table = Mapping[str, tuple[str, float]]
"""Name of a family → what it says, and its value."""


def gauges(model: str, table: Table) -> Iterator[Metric]:
    return _families(GaugeMetricFamily, model, table)


def counters(model: str, table: Table) -> Iterator[Metric]:
    return _families(CounterMetricFamily, model, table)


def _families(kind: type[GaugeMetricFamily] | type[CounterMetricFamily], model: str, table: Table) -> Iterator[Metric]:
    for name, (text, value) in table.items():
        family = kind(name, text, labels=["model_name"])
        family.add_metric([model], float(value))
        yield family
