"""Both forms of the residency code against a hot buffer kept by hand, and each invariant by itself."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from glm52_engine.kernels import hisparse, residency
from glm52_engine.kernels.residency import HostRows
from tests.engine.hisparse.support import BLOCK, Naive, World

LAYERS = range(5)


@pytest.fixture(params=[residency, hisparse], ids=["torch", "triton"])
def form(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@pytest.fixture
def world(form: ModuleType, device: str) -> World:
    return World(form, device=device)


def step(world: World, *rows: tuple[int, list[int], int], group: int = 0) -> list[set[int]]:
    """One full layer of a step, its rows checked; what was fetched for each row."""
    world.begin(rows)
    fetched = world.resolve(group)
    world.write_newest(LAYERS)
    world.gather(LAYERS[:2], group)
    world.gather(LAYERS[2:], group)
    for row in range(len(rows)):
        for layer in LAYERS:
            assert torch.equal(world.served(layer, row), world.wanted(layer, row))
    assert (world.plan.resident[len(rows) :] == -1).all()
    world.write_back(LAYERS)
    return fetched[: len(rows)]


def test_a_hot_buffer_kept_by_hand(world: World) -> None:
    draw = random.Random(52)
    naive = {(group, seat): Naive(world.residency.rows) for group in range(2) for seat in range(3)}
    hits = misses = 0
    for _ in range(40):
        rows = []
        for seat in draw.sample(range(3), draw.randint(0, 3)):
            mine = range(seat * 16, seat * 16 + 16)
            selected = sorted(draw.sample(mine, draw.randint(1, 6)))
            rows.append((seat, selected, draw.choice([*selected, mine[0]])))
        for group in range(2):
            fetched = step(world, *rows, group=group)
            for (seat, selected, own), got in zip(rows, fetched, strict=True):
                assert got == naive[group, seat].step(selected, own)
                assert world.order(seat, group) == naive[group, seat].held
                misses += len(got)
                hits += len(set(selected) - {own}) - len(got)
    # Every group was fetched for all of the five layers.
    assert world.residency.counters.tolist()[:5] == [hits, misses, 0, 5 * misses, 0]
    held = int((world.residency.owner[:, :3] >= 0).sum())
    assert world.residency.counters.tolist()[6] == held
    assert 0 < world.residency.counters.tolist()[5] <= misses - held
    assert hits > 50
    assert not world.residency.used.any()


def test_shared_layers_fetch_what_their_full_layer_planned(world: World) -> None:
    world.begin([(1, [4, 5, 9], 9)])
    assert world.resolve()[0] == {4, 5}
    before = world.hot.clone()
    world.gather(LAYERS[1:3])
    assert torch.equal(world.hot[[0, 3, 4]], before[[0, 3, 4]])
    for layer in (1, 2):
        assert torch.equal(world.served(layer, 0)[:2], world.wanted(layer, 0)[:2])


def test_a_step_begins_without_fetches(world: World) -> None:
    for group in range(2):
        step(world, (1, [4, 5, 9], 9), group=group)
    assert int(world.plan.count.sum()) > 0
    world.begin([(1, [4], 10)])
    assert world.plan.count.tolist() == [0, 0]


def test_padding_rows_never_touch_residency(world: World) -> None:
    step(world, (0, [0, 1, 2], 2), (1, [16, 17], 17))
    state = [world.residency.owner, world.residency.order, world.residency.where]
    kept = [tensor.clone() for tensor in state]
    # The rows carry on with the seats and selections of the step before; one of them selects something new.
    world.selected[1, 2] = 30
    world.begin([])
    host = world.host.tensor.clone()
    assert world.resolve() == [set()] * 4
    world.gather(LAYERS)
    world.write_back(LAYERS)
    assert torch.equal(host, world.host.tensor)
    assert (world.plan.resident == -1).all()
    assert (world.plan.newest == -1).all()
    assert int(world.plan.count[0]) == 0
    for tensor, before in zip(state, kept, strict=True):
        live = (slice(None), slice(0, tensor.shape[1] - 1))  # without the place for what padding rows would write
        assert torch.equal(tensor[live], before[live])


@pytest.mark.parametrize("beyond", [-1, 0, 5])
def test_a_new_row_without_a_place_is_not_written(world: World, beyond: int) -> None:
    own = -1 if beyond < 0 else world.host.slots + beyond
    world.begin([(0, [3, 4], own), (1, [20], 21)])
    world.resolve()
    world.write_newest(LAYERS)
    host = world.host.tensor.clone()
    world.write_back(LAYERS)
    for layer in LAYERS:
        rows = HostRows(host, BLOCK, world.host.row_bytes).layer(layer)
        rows[21 // BLOCK, 21 % BLOCK] = world.hot[layer][world.plan.newest[1].long()].cpu()
    assert torch.equal(host, world.host.tensor)


def test_a_read_out_of_bounds_is_zero_and_owned_by_nobody(world: World) -> None:
    beyond = world.host.slots
    for _ in range(2):  # the second time it is fetched again
        assert step(world, (0, [3, beyond, beyond + 7], 5)) == [{3, -1} if _ == 0 else {-1}]
        assert world.order(0).count(None) == world.residency.rows - 1
    assert world.residency.counters.tolist()[2] == 4


def test_rewritten_rows_are_fetched_anew(world: World) -> None:
    assert step(world, (0, [3, 4], 5)) == [{3, 4}]
    # A step is computed again, or a block has become another sequence's, and the token at slot 4 is written.
    assert step(world, (0, [3, 4], 4)) == [set()]
    assert step(world, (0, [3, 4], 5)) == [{4}]


def test_rows_are_numbered_by_seat_not_by_place_in_the_batch(world: World) -> None:
    assert step(world, (0, [3], 5), (2, [40], 41)) == [{3}, {40}]
    assert step(world, (2, [40], 41)) == [set()]
    assert step(world, (2, [40], 42), (0, [3], 6)) == [set(), set()]


def test_unwritten_rows_are_counted(world: World) -> None:
    world.host.layer(3)[1, 2] = residency.POISON
    step(world, (0, [BLOCK + 1, BLOCK + 2], 0))
    assert world.residency.counters.tolist()[4] == 1


@pytest.mark.parametrize("row_bytes", [656, 1152])
def test_rows_of_the_model(form: ModuleType, device: str, row_bytes: int) -> None:
    world = World(form, device=device, row_bytes=row_bytes, top_k=12, rows=20)
    for first in (0, 3, 17):
        step(world, (1, list(range(first, first + 12)), first + 5), (0, list(range(30, 40)), 47))


def test_plans_at_the_models_size(device: str) -> None:
    """2,048 of 4,096: the forms agree on what is fetched, where it goes and what is evicted next."""
    draw = random.Random(7)
    context = range(6000)
    worlds = [World(form, device=device, seats=2, top_k=2048, rows=4096, blocks=1600) for form in (residency, hisparse)]
    chosen = set(draw.sample(context, 2048))
    for length in range(6000, 6004):
        kept = draw.sample(sorted(chosen), 1400)
        chosen = {*kept, *draw.sample(sorted(set(context) - chosen), 647), length}
        rows = [(seat, sorted(chosen), length) for seat in (1, 0)]
        fetched = []
        for world in worlds:
            world.begin(rows)
            fetched.append(world.resolve())
        assert fetched[0] == fetched[1]
        assert torch.equal(worlds[0].plan.resident[:2], worlds[1].plan.resident[:2])
        for seat in (0, 1):
            assert worlds[0].order(seat) == worlds[1].order(seat)


@pytest.mark.parametrize("width", [16, 8208])
def test_blocks_are_copied_both_ways(form: ModuleType, device: str, width: int) -> None:
    host = torch.randint(0, 255, (9, 48 + width), dtype=torch.uint8)
    host = host.pin_memory() if device == "cuda" else host
    there = torch.zeros(9, width + 16, dtype=torch.uint8, device=device)
    ids = torch.tensor([7, 0, 3], device=device)
    part = host[:, 32 : 32 + width]
    form.copy_blocks(ids, part, there)
    wanted = torch.zeros(9, width + 16, dtype=torch.uint8)
    wanted[[7, 0, 3], :width] = part[[7, 0, 3]]
    assert torch.equal(there.cpu(), wanted)
    before = host.clone()
    there += 1
    form.copy_blocks(ids[:1], there[:, :width], part)
    if device == "cuda":
        torch.cuda.synchronize()
    before[7, 32 : 32 + width] += 1
    assert torch.equal(host, before)
    form.copy_blocks(ids[:0], part, there)
