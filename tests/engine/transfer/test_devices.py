"""Which devices KV crosses by, and that a name that is none is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from glm52_engine.config import ConfigError
from glm52_engine.transfer.agent import TransferAgent
from glm52_engine.transfer.devices import Choice, Found, apply, choose, find
from glm52_engine.transfer.pulls import Pull
from tests.engine.serve.fakes import FakePool

NODE = Found(("mlx5_0:1", "mlx5_1:1", "mlx5_2:1"), ("eth0", "lo"))


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True)
    file.write_text(text + "\n")


def test_what_is_active_is_found(tmp_path: Path) -> None:
    write(tmp_path, "infiniband/mlx5_1/ports/1/state", "4: ACTIVE")
    write(tmp_path, "infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(tmp_path, "infiniband/mlx5_0/ports/2/state", "1: DOWN")
    write(tmp_path, "net/eth0/operstate", "up")
    write(tmp_path, "net/eth1/operstate", "down")
    write(tmp_path, "net/lo/operstate", "unknown")
    assert find(tmp_path) == Found(("mlx5_0:1", "mlx5_1:1"), ("eth0", "lo"))
    assert find(tmp_path / "nothing") == Found((), ())


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        pytest.param("auto", Choice((), 3), id="every rail"),
        pytest.param("mlx5_1:1", Choice(("mlx5_1:1",), 1), id="one rail"),
        pytest.param("mlx5_0:1,eth0", Choice(("mlx5_0:1", "eth0"), 1), id="a rail and an interface"),
    ],
)
def test_choice(asked: str, chosen: Choice) -> None:
    assert choose(asked, NODE) == chosen


@pytest.mark.parametrize("asked", ["mlx5_0", "mlx5_9:1", "eth0,mlx5_9:1", "Auto"])
def test_a_device_that_is_not_there_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"netDevices: .* is not there .*mlx5_0:1, mlx5_1:1, mlx5_2:1; .*: eth0, lo"):
        choose(asked, NODE)


@pytest.mark.parametrize(("rails", "said"), [(2, None), (3, "3"), (8, "8")])
def test_one_transfer_goes_by_every_rail(monkeypatch: pytest.MonkeyPatch, rails: int, said: str | None) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    assert apply(Choice((), rails)) == {}
    assert environment.get("UCX_MAX_RNDV_RAILS") == said


async def test_kv_crosses_by_the_named_device() -> None:
    pools = [FakePool(4), FakePool(4)]
    pools[0].write([2], [1, 2, 3, 4])
    agents = [
        TransferAgent(
            f"by-{name}/1", [pool], on_notice=lambda notice: None, expects=lambda: True, devices=Choice(("lo",))
        )
        for name, pool in zip(("prefill", "decode"), pools, strict=True)
    ]
    try:
        for agent in agents:
            await asyncio.to_thread(agent.start)
        await agents[1].pull(Pull(agents[0].described, 0, [2], 0, [1], b"read"))
        assert pools[1].read([1], 4) == pools[0].read([2], 4)
    finally:
        for agent in agents:
            agent.close()
