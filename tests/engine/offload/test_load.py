"""A pod's engine as its configuration has it: with a part of the store, or without any trace of one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm52_engine.config import ConfigError, DrainConfig, EngineConfig, ModelConfig, Role, RoleConfig, StoreConfig
from glm52_engine.serve.load import load_engine
from glm52_engine.serve.metrics import Metrics
from glm52_engine.transfer.hold import TransferCounters
from tests.engine.offload.conftest import Master, in_time
from tests.metrics_table import documented, served


def configured(checkpoint: Path, store: StoreConfig | None) -> EngineConfig:
    """Of a pod of either role."""
    role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=2, store=store)
    model = ModelConfig(name="tiny", path=str(checkpoint), max_model_len=256, weights_gib=1)
    return EngineConfig(model=model, prefill=role, decode=role, drain=DrainConfig(window_seconds=1))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_configured_store_is_used_and_its_state_can_be_scraped(
    tiny_checkpoint: Path, master: Master, role: Role
) -> None:
    config = configured(tiny_checkpoint, StoreConfig(master=master.address, store_gib=1))
    engine, _, _ = load_engine(config, role, lambda phase: None)
    try:
        metrics = Metrics("tiny", engine.stats, TransferCounters(), lambda: 0)
        await in_time(lambda: 'glm52_store_up{model_name="tiny"} 1.0' in metrics.text().decode())
        told = served(text_string_to_metric_families(metrics.text().decode()))
        assert {row for row in told if row[0].startswith("glm52_store")} == documented()["store"]
    finally:
        engine.stop()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_one_there_is_no_client(tiny_checkpoint: Path, role: Role) -> None:
    engine, _, _ = load_engine(configured(tiny_checkpoint, None), role, lambda phase: None)
    try:
        assert engine.stats().store is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("store-")]
        assert b"glm52_store" not in Metrics("tiny", engine.stats, TransferCounters(), lambda: 0).text()
    finally:
        engine.stop()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_replica_of_several_hosts_refuses_it(tiny_checkpoint: Path, role: Role) -> None:
    config = configured(tiny_checkpoint, StoreConfig(master="chat-store.ns.svc:50051", store_gib=1))
    with pytest.raises(ConfigError, match="store: a replica of several hosts"):
        load_engine(config, role, lambda phase: None, rank_hosts=["127.0.0.1:1"])
