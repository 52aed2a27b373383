"""What one rank host loads: the weights of its ranks' experts and their pools, both at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from glm52_engine.checkpoint import ModelSpec, Weights, load_weights, read_fingerprint, weight_bytes
from glm52_engine.config import EngineConfig, Role
from glm52_engine.kv import Pool
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.ranks.messages import Terms
from glm52_engine.ranks.spans import RankSpan, experts_of
from glm52_engine.runtime.load import Measures, Options, kv_contract, measure
from glm52_engine.runtime.preflight import check_memory, memory_limit
from glm52_engine.runtime.progress import ProgressLines

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HostParts:
    measures: Measures
    weights: Weights
    pools: list[Pool]
    layout: dict[str, str | int]

    @property
    def spec(self) -> ModelSpec:
        return self.measures.spec


def read_terms(config: EngineConfig, role: Role, hosts: tuple[int, ...], phases: Phases) -> tuple[Measures, Terms]:
    """What the hosts of a replica compare, read from the checkpoint's headers. Raises ConfigError."""
    path = Path(config.model.path)
    with phases.phase("reading the checkpoint's headers"):
        measures = measure(path, Options.of(config, role))
        fingerprint = read_fingerprint(path, measures.spec)
    limits = measures.limits
    terms = Terms(
        fingerprint=fingerprint,
        hosts=hosts,
        block_size=limits.block_size,
        block_bytes=measures.kv.block_bytes,
        blocks=limits.blocks,
        seats=limits.seats,
        max_model_len=limits.max_model_len,
        step_tokens=measures.step.budget,
    )
    return measures, terms


def load_host(
    config: EngineConfig, role: Role, measures: Measures, span: RankSpan, world: int, phases: Phases, say: Say
) -> HostParts:
    """Blocking. Raises ConfigError for what can never work."""
    path, spec = Path(config.model.path), measures.spec
    experts = experts_of(span.ranks, world=world, experts=spec.n_routed_experts)
    check_memory(
        config.role(role),
        weights=weight_bytes(spec, experts=experts),
        accelerator=config.accelerator,
        limit=memory_limit(),
    )

    def weights() -> Weights:
        with phases.phase("reading weights"):
            return load_weights(path, spec, experts=experts, on_progress=ProgressLines("reading weights", say))

    def pools() -> list[Pool]:
        with phases.phase("touching the pools"):
            made = [Pool(measures.kv, measures.limits.blocks) for _ in span.ranks]
            for pool in made:
                pool.touch()
            return made

    with ThreadPoolExecutor(2, thread_name_prefix="load") as threads:
        reading, touching = threads.submit(weights), threads.submit(pools)
        loaded = reading.result()
        return HostParts(measures, loaded, touching.result(), kv_contract(measures.kv, loaded))
