"""`HotPool` and `HotStep`: what attention is given is what host memory holds, whatever happened before."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from glm52_engine.kernels import hisparse, residency
from glm52_engine.kernels.residency import HostRows
from glm52_engine.kv.hisparse import HotPool, HotStep, layer_groups
from glm52_engine.kv.hisparse import hot as hot_module
from tests.engine.hisparse.support import BLOCK, ROW, Naive

TYPES = ("full", "full", "shared", "shared", "full", "shared")
TOP_K, ROWS, SEATS, BLOCKS, BATCH = 6, 8, 3, 10, 4


def truth(request: int, layer: int, position: int) -> torch.Tensor:
    """The KV of a request's token: 32 bytes, none of which is 0xFF."""
    return ((torch.arange(ROW) + 131 * request + 17 * layer + 7 * position) % 251).to(torch.uint8)


@dataclasses.dataclass
class Request:
    """A sequence in a seat: `length` tokens of it have KV."""

    number: int
    seat: int
    blocks: list[int]
    length: int

    @property
    def room(self) -> int:
        return len(self.blocks) * BLOCK - self.length

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK


class Rank:
    """A rank that computes nothing: requests come, take steps with any selection, and go."""

    def __init__(self, form: ModuleType, device: str, *, auto: bool = False) -> None:
        host = torch.empty(BLOCKS, BLOCK * len(TYPES) * ROW + 16, dtype=torch.uint8)
        self.groups = layer_groups(TYPES)
        self.pool = HotPool(
            HostRows(host.pin_memory() if device == "cuda" else host, BLOCK, ROW),
            self.groups, seats=SEATS, top_k=TOP_K, rows=ROWS, device=device, longest=4 if auto else None, debug=True,
            form=form,
        )  # fmt: skip
        self.steps = {batch: HotStep(self.pool, batch) for batch in (2, BATCH)}
        self.device = device
        self.free = list(range(BLOCKS))
        self.seats: dict[int, Request] = {}
        self.naive: dict[tuple[int, int], Naive] = {}
        self.came = 0

    def admit(self, seat: int, blocks: list[int], length: int) -> Request:
        request = self.seats[seat] = Request(self.came, seat, blocks, length)
        self.came += 1
        for block in blocks:
            self.free.remove(block)
        for layer in range(len(TYPES)):
            for position in range(length):
                self.pool.host.layer(layer)[blocks[position // BLOCK], position % BLOCK] = truth(
                    request.number, layer, position
                )
        whole = self.pool.whole
        self.pool.assign(seat, blocks, arrived=length)
        for group in range(len(self.groups)):
            self.naive[group, seat] = Naive(ROWS)
            for other in range(SEATS) if whole else ():
                self.naive[group, other] = Naive(ROWS)
        return request

    def finish(self, seat: int) -> None:
        request = self.seats.pop(seat)
        self.pool.release(seat)
        self.pool.poison(request.blocks, 0)
        self.free += request.blocks

    def counters(self) -> dict[str, int]:
        self.pool.tell()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.pool.counters()

    def step(self, rows: Sequence[tuple[Request, Sequence[Sequence[int]]]], *, advance: bool = True) -> None:
        """`rows`: who takes part, and the positions that each full layer selects, the row's own last."""
        batch = next(size for size in self.steps if size >= len(rows))
        step = self.steps[batch]
        stale = [request.seat for request, _ in rows] + [0] * batch
        seats = torch.tensor(stale[:batch], dtype=torch.int32, device=self.device)
        own = torch.zeros(batch, dtype=torch.int32, device=self.device)
        for row, (request, _) in enumerate(rows):
            own[row] = request.slot(request.length)
        active = torch.tensor(len(rows), dtype=torch.int32, device=self.device)
        self.pool.settle({request.seat: request.length for request, _ in rows})
        misses = self.counters()["misses"]
        if self.pool.whole:
            positions = torch.tensor([*(r.length for r, _ in rows), *[0] * batch][:batch], device=self.device)
            step.begin_whole(self.pool.frames[seats.long()], positions, own, active)
        else:
            step.begin(seats, own, active)
        newest = step.newest.tolist()
        assert newest[len(rows) :] == [-1] * (batch - len(rows))
        wanted = 0
        for group, layers in enumerate(self.groups):
            # Padding rows repeat a live row's selection: it must not count.
            selected = torch.full((batch, TOP_K), self.seats[0].slot(0) if 0 in self.seats else 0, dtype=torch.int32)
            for row, (request, positions) in enumerate(rows):
                slots = [request.slot(position) for position in positions[group]]
                if self.pool.whole:
                    frames = self.pool.frames[request.seat].tolist()
                    slots = [frames[position // BLOCK] * BLOCK + position % BLOCK for position in positions[group]]
                else:
                    wanted += len(self.naive[group, request.seat].step(slots, int(own[row])))
                selected[row] = torch.tensor(slots + [-1] * (TOP_K - len(slots)), dtype=torch.int32)
            selected = selected.to(self.device)
            for layer in layers:
                hot = self.pool.rows(layer)
                for row, (request, _) in enumerate(rows):
                    hot[newest[row]] = truth(request.number, layer, request.length).to(self.device)
                resident = step.fetch(layer, selected).tolist()
                for row, (request, positions) in enumerate(rows):
                    for at, position in zip(resident[row], positions[group], strict=False):
                        assert hot[at].tolist() == truth(request.number, layer, position).tolist()
        step.end()
        found = self.counters()
        assert (found["misses"], found["unwritten"]) == (misses + wanted, 0)
        for request, _ in rows:
            request.length += advance


class Interleavings(RuleBasedStateMachine):
    """Admissions, steps, repeated steps and ends in any order."""

    form: ModuleType = residency
    device = "cpu"
    auto = False

    @initialize()
    def start(self) -> None:
        self.rank = Rank(self.form, self.device, auto=self.auto)

    @rule(seat=st.integers(0, SEATS - 1), blocks=st.integers(1, 4), room=st.integers(1, 6), draw=st.randoms())
    def admit(self, seat: int, blocks: int, room: int, draw: random.Random) -> None:
        if seat in self.rank.seats:
            self.rank.finish(seat)
        blocks = min(blocks, len(self.rank.free))
        if blocks:
            self.rank.admit(seat, draw.sample(self.rank.free, blocks), max(0, blocks * BLOCK - room))

    @rule(count=st.integers(0, SEATS), draw=st.randoms(), advance=st.booleans())
    def step(self, count: int, draw: random.Random, advance: bool) -> None:
        able = [request for request in self.rank.seats.values() if request.room > 0]
        rows = []
        for request in draw.sample(able, min(count, len(able))):
            positions = []
            for _ in self.rank.groups:
                others = min(TOP_K - 1, draw.randint(0, request.length))
                # Overlapping selections, as indexers make them: mostly the end of the context.
                known = range(max(0, request.length - ROWS), request.length) if draw.random() < 0.7 else None
                known = known if known and len(known) >= others else range(request.length)
                positions.append([*sorted(draw.sample(known, others)), request.length])
            rows.append((request, positions))
        self.rank.step(rows, advance=advance)

    @rule(seat=st.integers(0, SEATS - 1))
    def finish(self, seat: int) -> None:
        if seat in self.rank.seats:
            self.rank.finish(seat)

    @invariant()
    def every_hot_row_is_numbered_once(self) -> None:
        order = self.rank.pool.residency.order[:, :SEATS].cpu()
        assert torch.equal(order.sort(-1).values, torch.arange(ROWS, dtype=torch.int16).expand(order.shape))

    @invariant()
    def the_counted_rows_are_those_that_are_held(self) -> None:
        if not self.rank.pool.whole:
            held = self.rank.pool.residency.owner[:, :SEATS] >= 0
            assert self.rank.counters()["held"] == int(held.sum())


class Switching(Interleavings):
    """The same where contexts lie whole as long as they fit: six frames for ten blocks."""

    auto = True
    switches = 0

    def teardown(self) -> None:
        Switching.switches += self.rank.pool.switches


def thorough(examples: int, *, steps: int) -> settings:
    """On a machine that does other things too an example may take seconds."""
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.fixture
def few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_module, "_ROW_ALIGNMENT", 1)


@pytest.mark.parametrize("machine", [Interleavings, Switching])
def test_any_interleaving(machine: type[Interleavings], few_frames: None) -> None:
    run_state_machine_as_test(machine, settings=thorough(60, steps=50))
    assert Switching.switches > 10 or machine is not Switching


@pytest.mark.parametrize("auto", [False, True])
def test_any_interleaving_in_triton(device: str, auto: bool, few_frames: None) -> None:
    class InTriton(Interleavings):
        form = hisparse

    InTriton.device, InTriton.auto = device, auto
    run_state_machine_as_test(InTriton, settings=thorough(20, steps=20))


@pytest.fixture(params=[residency, hisparse], ids=["torch", "triton"])
def rank(request: pytest.FixtureRequest, device: str) -> Rank:
    return Rank(request.param, device)


def every(rank: Rank, positions: Sequence[int]) -> list[Sequence[int]]:
    return [positions] * len(rank.groups)


def test_a_block_that_is_assigned_drops_its_hot_copies(rank: Rank) -> None:
    reader = rank.admit(0, [3, 4], 6)
    rank.step([(reader, every(rank, [1, 2, 6]))])
    # The same block gets another request's rows while the old reader's seat is not touched.
    rank.free.append(3)
    rank.admit(1, [3], 3)
    reader.number, kept = rank.seats[1].number, reader.number
    for group in range(len(rank.groups)):
        rank.naive[group, 0].drop({reader.slot(1), reader.slot(2)})
    rank.step([(reader, every(rank, [1, 2]))])
    reader.number = kept


def test_whole_contexts_hot_buffers_and_back(rank: Rank, device: str, few_frames: None) -> None:
    """Six frames; whatever form a step has, it reads what the requests have written, and nothing of the form before."""
    rank = Rank(rank.pool.form, device, auto=True)
    first = rank.admit(0, [0, 1], 5)
    rank.step([(first, every(rank, [1, 2, 5]))])
    rank.admit(1, [2, 3, 4, 5], 10)
    assert rank.pool.frames_used == (6, 6)
    third = rank.admit(2, [6], 1)
    assert not rank.pool.whole
    rank.step([(first, every(rank, [1, 2, 5, 6]))])
    rank.finish(1)
    # The third one's length is not known to this step.
    rank.step([(first, every(rank, [2, 7]))], advance=False)
    assert (rank.pool.whole, rank.counters()["held"]) == (False, 3 * len(rank.groups))
    rank.step([(first, every(rank, [1, 2, 6, 7])), (third, every(rank, [0, 1]))])
    assert rank.pool.whole
    rank.finish(0)
    again = rank.admit(0, [0, 1], 5)
    rank.admit(1, [2, 3, 4, 5], 10)
    assert (rank.pool.whole, rank.pool.switches, rank.counters()["held"]) == (False, 3, 0)
    rank.step([(again, every(rank, [1, 2, 4, 5])), (third, every(rank, [0, 1, 2]))])


def test_a_seat_that_is_assigned_holds_nothing(rank: Rank) -> None:
    rank.step([(rank.admit(0, [3], 3), every(rank, [0, 1, 3]))])
    rank.finish(0)
    rank.admit(0, [5], 3)
    assert (rank.pool.residency.owner[:, 0] == -1).all()


def test_more_rows_than_a_step_of_another_size(rank: Rank) -> None:
    first, second = rank.admit(0, [0, 1], 6), rank.admit(2, [8], 2)
    rank.step([(first, every(rank, [0, 5, 6]))])
    rank.step([(second, every(rank, [0, 2])), (first, every(rank, [0, 6, 7]))])
    rank.step([])
    assert rank.counters()["hits"] == len(rank.groups)


def test_a_row_that_never_came_is_noticed(rank: Rank) -> None:
    request = rank.admit(0, [1], 2)
    request.length = 3
    with pytest.raises(AssertionError):
        rank.step([(request, every(rank, [2, 3]))])
    assert rank.counters()["unwritten"] > 0


def test_what_the_request_before_has_left_is_not_taken_for_written(rank: Rank) -> None:
    rank.admit(0, [1], 3)
    del rank.seats[0]
    rank.free.append(1)
    request = rank.admit(0, [1], 1)
    request.length = 2
    with pytest.raises(AssertionError):
        rank.step([(request, every(rank, [1, 2]))])
    assert rank.counters()["unwritten"] > 0


def test_what_cannot_be() -> None:
    host = HostRows(torch.zeros(2, 4 * 32, dtype=torch.uint8), 4, 32)
    with pytest.raises(ValueError, match=r"hot buffer of 5 rows; expected index_topk \(6\) to 32767"):
        HotPool(host, [range(1)], seats=1, top_k=6, rows=5, device="cpu")
    with pytest.raises(ValueError, match="rows of 40"):
        HotPool(
            dataclasses.replace(host, row_bytes=40), [range(1)], seats=1, top_k=6, rows=6, device="cpu", form=hisparse
        )
    with pytest.raises(ValueError, match="first layer is shared"):
        layer_groups(("shared", "full"))


def test_of_many_that_come_at_once_none_is_brought_for_nothing(rank: Rank, device: str, few_frames: None) -> None:
    """Six frames: what the last one's context leaves no room for is not fetched whole before."""
    rank = Rank(rank.pool.form, device, auto=True)
    rank.admit(0, [0, 1], 5)
    rank.admit(1, [2, 3, 4, 5], 10)
    rank.admit(2, [6], 1)
    rank.pool.settle({})
    assert (rank.pool.whole, rank.counters()["fetched"]) == (False, 0)
