"""Experts on several ranks compute what one rank computes; padding is nobody, and ranks that disagree are found out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import ModelSpec, load_weights, read_model_spec
from glm52_engine.model.moe import Moe
from glm52_engine.model.weights import under
from glm52_engine.ranks.collectives import CollectiveError
from glm52_engine.ranks.experts import ShardedMoe
from glm52_engine.ranks.lane import Desync, Lane
from glm52_engine.ranks.messages import Flags, Shape
from tests.engine.ranks.groups import Group, group

CPU = torch.device("cpu")
WORLD = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Group]:
    with group(WORLD) as made:
        yield made


@pytest.fixture(scope="module")
def spec(tiny_checkpoint: Path) -> ModelSpec:
    return read_model_spec(tiny_checkpoint)


@pytest.fixture(scope="module")
def layer(tiny_checkpoint: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The mixture of the first layer that has one."""
    index = next(index for index in range(spec.num_hidden_layers) if spec.is_moe(index))
    return under(load_weights(tiny_checkpoint, spec).tensors, f"model.layers.{index}.mlp.")


def shape(active: Sequence[int], bucket: int, number: int = 1) -> Shape:
    return Shape(number, bucket, tuple(active), Flags(prefill=False))


def computed(
    ranks: Group, spec: ModelSpec, layer: dict[str, torch.Tensor], x: torch.Tensor, active: Sequence[int], bucket: int
) -> torch.Tensor:
    """Rows [sum(active), hidden], dealt out to the ranks, in their order."""
    parts = torch.split(x, list(active))

    def run(rank: int) -> torch.Tensor:
        lane = Lane(ranks.members[rank], device=CPU, debug=True)
        moe = ShardedMoe(spec, layer, lane)
        lane.enter(shape(active, bucket))
        with torch.inference_mode():
            out = moe.forward(parts[rank])
        lane.leave()
        return out

    return torch.cat(ranks.each(run))


@pytest.mark.parametrize(
    ("active", "bucket"),
    [((4, 4, 4), 4), ((5, 1, 2), 8), ((1, 0, 0), 1), ((0, 7, 0), 8), ((0, 0, 1), 16)],
)
def test_all_ranks_together_compute_what_one_does(
    ranks: Group, spec: ModelSpec, layer: dict[str, torch.Tensor], active: tuple[int, ...], bucket: int
) -> None:
    x = torch.randn(sum(active), spec.hidden_size, generator=torch.Generator().manual_seed(bucket))
    with torch.inference_mode():
        expected = Moe(spec, layer).forward(x)
    found = computed(ranks, spec, layer, x, active, bucket)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_row_is_the_same_whoever_has_it_and_whatever_the_others_do(
    ranks: Group, spec: ModelSpec, layer: dict[str, torch.Tensor]
) -> None:
    x = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    alone = [computed(ranks, spec, layer, x[row : row + 1], (0, 1, 0), 4) for row in range(3)]
    together = computed(ranks, spec, layer, x, (1, 1, 1), 4)
    torch.testing.assert_close(torch.cat(alone), together, atol=1e-5, rtol=1e-5)


def test_a_row_of_zeros_is_a_row(ranks: Group, spec: ModelSpec, layer: dict[str, torch.Tensor]) -> None:
    x = torch.zeros(1, spec.hidden_size)
    with torch.inference_mode():
        expected = Moe(spec, layer).forward(x)
    torch.testing.assert_close(computed(ranks, spec, layer, x, (0, 1, 0), 2), expected)


def test_each_rank_needs_its_own_experts_only(
    ranks: Group, spec: ModelSpec, layer: dict[str, torch.Tensor], tiny_checkpoint: Path
) -> None:
    def names(rank: int) -> ShardedMoe:
        lane = Lane(ranks.members[rank], device=CPU)
        own = {
            name: tensor
            for name, tensor in layer.items()
            if not name.startswith("experts.") or int(name.split(".")[1]) in ShardedMoe.experts(spec, lane)
        }
        return ShardedMoe(spec, own, lane)

    assert len(ranks.each(names)) == WORLD


def test_a_rank_in_another_step_is_told_by_all_of_them(ranks: Group) -> None:
    def run(rank: int) -> None:
        Lane(ranks.members[rank], device=CPU, debug=True).enter(shape((1, 1, 1), 1, number=7 if rank == 1 else 6))

    for error in ranks.errors(run):
        assert isinstance(error, Desync)
        assert "rank 1 begins in step 7" in str(error)
        assert "rank 2 begins in step 6" in str(error)


@pytest.mark.parametrize("missing", ["all_gather", "all_to_all"])
def test_a_rank_that_skips_a_collective_is_found_in_that_step(ranks: Group, missing: str) -> None:
    def run(rank: int) -> None:
        lane = Lane(ranks.members[rank], device=CPU, debug=True)
        lane.enter(shape((1, 1, 1), 2))
        for name, rows in (("all_gather", torch.zeros(2, 8)), ("all_to_all", torch.zeros(WORLD, 2, 8))):
            if (rank, name) != (2, missing):
                getattr(lane, name)(rows)
        lane.leave()

    assert all(isinstance(error, Desync) for error in ranks.errors(run))


def test_a_rank_with_another_bucket_is_found_before_bytes_are_mixed_up(ranks: Group) -> None:
    def run(rank: int) -> None:
        Lane(ranks.members[rank], device=CPU, debug=True).enter(shape((1, 1, 1), 2 if rank else 4))

    assert all("bucket 4" in str(error) for error in ranks.errors(run))


def test_outside_of_a_step_nothing_is_computed(ranks: Group, spec: ModelSpec, layer: dict[str, torch.Tensor]) -> None:
    moe = ShardedMoe(spec, layer, Lane(ranks.members[0], device=CPU))
    with pytest.raises(RuntimeError, match="outside of any step"):
        moe.idle(torch.zeros(1))


def test_a_rank_that_leaves_ends_the_wait_of_the_others() -> None:
    with group(2) as pair:

        def run(rank: int) -> None:
            if rank == 1:
                pair.members[1].abort()
            else:
                pair.members[0].all_gather(torch.zeros(1))

        error = pair.errors(run)[0]
        assert isinstance(error, CollectiveError)
        assert "rank 0: a collective failed" in str(error)
