"""On a device: the KV of an answer's full blocks is in host memory when it ends, for the store of prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.types import Request
from tests.engine.checkpoint.support import random_tensors, write
from tests.engine.kernels.test_engine import BLOCK, running
from tests.engine.kernels.test_steps import CONFIG
from tests.engine.model.support import prompt
from tests.engine.runtime.shelf import Shelf
from tests.engine.runtime.support import eventually, generate, greedy, idle

OUTPUT = 13


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, gpu: bool) -> Path:
    config = CONFIG | ({"dtype": "bfloat16"} if gpu else {})
    return write(tmp_path_factory.mktemp("kept") / "m", config, random_tensors(config))


@pytest.mark.parametrize(
    "target",
    [
        pytest.param({}, id="plain"),
        pytest.param({"launch_ahead": True}, id="launched ahead"),
        pytest.param({"hot_rows": CONFIG["index_topk"] + 2, "hot_always": True}, id="hot buffers"),
        pytest.param({"hot_rows": CONFIG["index_topk"] + 2}, id="whole beside hot buffers"),
    ],
)
async def test_an_answers_blocks_are_those_that_a_prompt_would_have_given(
    checkpoint: Path, device: str, gpu: bool, target: dict[str, Any]
) -> None:
    shelf, expected = Shelf(), Shelf()
    asked = greedy("r", tuple(prompt(7, seed=3)), OUTPUT, ignore_eos=True)
    # The interpreter is slow, and the plain model computes the same.
    other = device if gpu else None
    with (
        running(checkpoint, other) as source,
        running(checkpoint, device, prefix_cache=False, store=shelf, **target) as decode,
        running(checkpoint, other, store=expected) as again,
    ):
        layout = decode.pools[0].layout  # type: ignore[attr-defined]
        said = [token.id for token in await generate(source, decode, asked)]
        await eventually(lambda: idle(decode))
        await computed(again, greedy("r", (*asked.prompt, *said), 4))
        await eventually(lambda: idle(again))
    assert len(shelf.kept) == (len(asked.prompt) + OUTPUT - 1) // BLOCK
    assert set(shelf.kept) <= set(expected.kept)
    used = layout.block_size * layout.token_bytes  # padding follows
    kind, near = (torch.bfloat16, 0.1) if gpu else (torch.float32, 1e-4)
    for key, block in shelf.kept.items():
        ours, theirs = (kept[:used].view(kind).float() for kept in (block, expected.kept[key]))
        assert (ours - theirs).abs().max() < near


async def computed(engine: LocalEngine, asked: Request) -> None:
    await engine.prefill(asked)
    engine.release(asked.id)
