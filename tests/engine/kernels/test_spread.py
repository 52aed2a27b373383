"""Experts that lie on several ranks, by kernel against plain PyTorch: ties, padding, ranks and experts without rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from glm52_engine.kernels import moe, spread
from glm52_engine.kernels.spread import Travelling
from glm52_engine.ranks.spans import experts_of
from tests.engine.kernels.test_kernels import close

SCALING = 2.5


class Layer:
    """A mixture's weights, drawn; `fp8`: as stored, and what they are worth."""

    def __init__(self, device: str, dtype: torch.dtype, *, dim: int, inner: int, experts: int, top: int, fp8: bool):
        self.dim, self.inner, self.experts, self.top = dim, inner, experts, top
        self.device, self.dtype = device, dtype
        self.gate = (torch.randn(experts, dim, device=device) * dim**-0.5).to(dtype)
        self.bias = torch.randn(experts, device=device) * 0.2
        self.up = (torch.randn(experts + 1, 2 * inner, dim, device=device) * dim**-0.5).to(dtype)
        self.down = (torch.randn(experts + 1, dim, inner, device=device) * inner**-0.5).to(dtype)
        self.up_scale = self.down_scale = None
        self.up_values, self.down_values = self.up.float(), self.down.float()
        if fp8:
            self.up_scale = torch.rand(experts + 1, 2 * inner // 128, dim // 128, device=device) + 0.5
            self.down_scale = torch.rand(experts + 1, dim // 128, inner // 128, device=device) + 0.5
            self.up, self.down = self.up.to(torch.float8_e4m3fn), self.down.to(torch.float8_e4m3fn)
            self.up_values = self.up.float() * blocks(self.up_scale)
            self.down_values = self.down.float() * blocks(self.down_scale)

    def of(self, held: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What a rank has: its experts' matrices and the shared one's."""
        at = torch.tensor([*held, self.experts], device=self.device)
        scales = [None if s is None else s[at] for s in (self.up_scale, self.down_scale)]
        up, down = (w.view(torch.uint8)[at].view(w.dtype) if w.element_size() == 1 else w[at] for w in self.matrices)
        return up, down, scales[0], scales[1]

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up, self.down

    def choice(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score = (x.float() @ self.gate.float().T).sigmoid()
        # Stable and descending: the lowest of equals comes first.
        best = (score + self.bias).sort(dim=1, descending=True, stable=True).indices[:, : self.top]
        weight = score.gather(1, best)
        return best, weight / weight.sum(1, keepdim=True) * SCALING

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), self.dim, device=self.device)
        best, weight = self.choice(x)
        for row in range(len(x)):
            for expert, by in [*zip(best[row].tolist(), weight[row].tolist(), strict=True), (self.experts, 1.0)]:
                both = self.up_values[expert] @ x[row].float()
                gated = F.silu(both[: self.inner]) * both[self.inner :]
                out[row] += by * (self.down_values[expert] @ gated)
        return out


def blocks(scale: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


class Replica:
    """Ranks one after the other; every buffer is full of NaN before."""

    def __init__(self, layer: Layer, x: torch.Tensor, active: Sequence[int]) -> None:
        """x [ranks, rows, D]: the first `active` rows of each are real."""
        self.layer, self.x = layer, x
        self.world, self.rows = len(active), x.shape[1]
        self.active = [torch.full((), count, dtype=torch.int32, device=layer.device) for count in active]
        self.routed = [
            spread.Routed(
                self.rows, experts_of(range(rank, rank + 1), world=self.world, experts=layer.experts), layer.experts,
                layer.top, rank=rank, world=self.world, device=layer.device,
            )
            for rank in range(self.world)
        ]  # fmt: skip
        self.everyone = self._travelling(self.world)
        for rank in range(self.world):
            own = self._travelling(1)
            own.raw.fill_(0xFF)
            spread.decide(
                x[rank], layer.gate, layer.bias, self.active[rank], self.routed[rank], own, scaling=SCALING,
                normalise=True,
            )  # fmt: skip
            self.everyone.raw[rank] = own.raw[0]

    def _travelling(self, ranks: int) -> Travelling:
        layer = self.layer
        return Travelling(ranks, self.rows, layer.dim, layer.top, dtype=layer.dtype, device=layer.device)

    def part(self, rank: int) -> torch.Tensor:
        """What a rank adds to everybody's rows, [ranks, rows, D]."""
        layer, routed, all_rows = self.layer, self.routed[rank], self.world * self.rows
        up, down, up_scale, down_scale = layer.of(routed.held)
        gated = layer.gate.new_full((all_rows, routed.slots, layer.inner), torch.nan)
        shares = layer.gate.new_full((all_rows, routed.slots, layer.dim), torch.nan)
        out = layer.bias.new_full((all_rows, layer.dim), torch.nan)
        spread.assign(self.everyone, self.active[rank], routed)
        moe.up(self.everyone.values, up, gated, routed, scale=up_scale)
        moe.down(gated, down, shares, routed, scale=down_scale)
        spread.add_up(shares, self.everyone, self.active[rank], routed, out)
        return out.view(self.world, self.rows, layer.dim)


def sizes(gpu: bool) -> dict[str, int]:
    if gpu:
        return {"dim": 6144, "inner": 2048, "experts": 32, "top": 8}
    return {"dim": 256, "inner": 128, "experts": 6, "top": 2}


@pytest.mark.parametrize(
    ("active", "rows", "of"),
    [
        pytest.param((1,), 1, "values", id="one rank"),
        pytest.param((3, 2), 4, "values", id="padding"),
        pytest.param((3, 2), 4, "fp8", id="fp8"),
        pytest.param((3, 2), 4, "bfloat16", id="bfloat16"),
        pytest.param((0, 5, 0, 1), 8, "values", id="ranks without rows"),
        pytest.param((0, 0, 0, 1, 1, 1, 0), 1, "fp8", id="a rank without experts"),
        pytest.param((20, 33), 40, "values", id="rows for several passes of an expert"),
    ],
)
def test_all_ranks_together_add_what_one_does(
    device: str, dtype: torch.dtype, gpu: bool, active: Sequence[int], rows: int, of: str
) -> None:
    if of == "bfloat16":
        dtype = torch.bfloat16
    layer = Layer(device, dtype, fp8=of == "fp8", **sizes(gpu))
    layer.bias[2] = -9.0  # nobody goes there
    x = torch.randn(len(active), rows, layer.dim, device=device).to(dtype)
    for rank, count in enumerate(active):
        x[rank, count:] = torch.nan
    replica = Replica(layer, x, active)
    parts = [replica.part(rank) for rank in range(len(active))]
    for rank, count in enumerate(active):
        found = torch.stack([part[rank] for part in parts]).sum(0)
        if count:
            want = layer.plain(x[rank, :count])
            error = (found[:count] - want).norm() / want.norm()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2)
        assert not found[count:].any(), "nobody computes padding, and nobody leaves what was in its place"


def test_each_row_goes_where_its_own_rank_sent_it(device: str, dtype: torch.dtype, gpu: bool) -> None:
    layer = Layer(device, dtype, fp8=False, **sizes(gpu))
    layer.gate[:] = layer.gate[0]  # all alike: the lowest win
    layer.bias[:] = 0.1
    layer.bias[1] = 0.0
    top = layer.top
    active = (2, 0, 3)
    x = torch.randn(3, 4, layer.dim, device=device).to(dtype)
    replica = Replica(layer, x, active)
    lowest = [0, *range(2, top + 1)]
    experts, weights = replica.everyone.experts.view(3, 4, top), replica.everyone.weights.view(3, 4, top)
    values = replica.everyone.values.view(3, 4, -1)
    assert torch.equal(values, x)
    for rank, count in enumerate(active):
        assert experts[rank].tolist() == [lowest] * count + [[-1] * top] * (4 - count)
        assert (weights[rank, :count] * top - SCALING).abs().max() < 1e-5 if count else True
    for rank, routed in enumerate(replica.routed):
        spread.assign(replica.everyone, replica.active[rank], routed)
        rows = [row for row in range(12) if row % 4 < active[row // 4]]
        busy = set(routed.busy[1 : 1 + int(routed.busy[0])].tolist())
        for place, expert in enumerate(routed.held):
            want = [row * (top + 1) + lowest.index(expert) for row in rows] if expert in lowest else []
            assert routed.members[place, : int(routed.counts[place])].tolist() == want
            assert (place in busy) == bool(want)
        own = [row * (top + 1) + top for row in rows if row // 4 == rank]
        assert routed.members[-1, : int(routed.counts[-1])].tolist() == own
        assert (len(routed.held) in busy) == bool(own)


def test_decisions_are_those_of_a_rank_alone(device: str, dtype: torch.dtype, gpu: bool) -> None:
    layer = Layer(device, dtype, fp8=False, **sizes(gpu))
    x = torch.randn(1, 6, layer.dim, device=device).to(dtype)
    replica = Replica(layer, x, [6])
    alone = moe.Routed(6, layer.experts, layer.top, device)
    moe.route(x[0], layer.gate, layer.bias, replica.active[0], alone, scaling=SCALING, normalise=True)
    spread.assign(replica.everyone, replica.active[0], replica.routed[0])
    routed = replica.routed[0]
    assert torch.equal(routed.counts, alone.counts)
    for expert, count in enumerate(alone.counts.tolist()):
        assert routed.members[expert, :count].tolist() == alone.members[expert, :count].tolist()
    assert (routed.weights - alone.weights).abs().max() < 1e-6
    experts = int(alone.busy[0])
    assert sorted(routed.busy[1 : 1 + experts].tolist()) == alone.busy[1 : 1 + experts].tolist()
    assert routed.busy[0] == experts


def test_more_rows_than_a_program_takes_at_a_time(device: str) -> None:
    world, rows, top, experts = 3, 400, 2, 7
    everyone = Travelling(world, rows, 8, top, dtype=torch.float32, device=device)
    chosen = torch.rand(world * rows, experts, device=device).topk(top).indices.int()
    real = torch.arange(world * rows, device=device) % rows < 390
    everyone.experts[:] = torch.where(real[:, None], chosen, -1)
    everyone.weights.normal_()
    held = range(2, 5)
    routed = spread.Routed(rows, held, experts, top, rank=1, world=world, device=device)
    spread.assign(everyone, torch.full((), 390, dtype=torch.int32, device=device), routed)
    for place, expert in enumerate(held):
        row, slot = (everyone.experts == expert).nonzero(as_tuple=True)
        count = int(routed.counts[place])
        assert routed.members[place, :count].tolist() == (row * (top + 1) + slot).tolist()
        assert torch.equal(routed.weights[row, slot], everyone.weights[row, slot])
    assert routed.members[3, : int(routed.counts[3])].tolist() == [row * 3 + 2 for row in range(400, 790)]
    assert torch.equal(routed.weights[400:790, 2], torch.ones(390, device=device))
    assert sorted(routed.busy[1 : 1 + int(routed.busy[0])].tolist()) == [0, 1, 2, 3]


def test_a_row_that_is_no_number_harms_no_other(device: str, dtype: torch.dtype, gpu: bool) -> None:
    layer = Layer(device, dtype, fp8=False, **sizes(gpu) | {"top": 4})
    x = torch.randn(2, 3, layer.dim, device=device).to(dtype)
    x[0, 1, 5] = torch.nan
    replica = Replica(layer, x, [3, 3])
    # As a card may have it: one expert for all slots.
    replica.everyone.experts[1] = 1
    found = torch.stack([replica.part(rank) for rank in range(2)]).sum(0)
    first = replica.routed[0]
    went = first.members[1, : int(first.counts[1])] // first.slots
    assert went.tolist() == (replica.everyone.experts == 1).any(1).nonzero().flatten().tolist()
    assert found[0, 1].isnan().all()
    for rank, row in [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]:
        close(found[rank, row], layer.plain(x[rank, row : row + 1])[0])


def test_a_row_is_the_same_in_any_company(device: str, dtype: torch.dtype, gpu: bool) -> None:
    layer = Layer(device, dtype, fp8=False, **sizes(gpu))
    x = torch.randn(2, 4, layer.dim, device=device).to(dtype)
    first, second = (Replica(layer, x, active) for active in ((1, 4), (1, 0)))
    for rank in range(2):
        assert torch.equal(first.part(rank)[0, 0], second.part(rank)[0, 0])


def test_placed_parts_are_summed_and_the_others_left_out(device: str, dtype: torch.dtype) -> None:
    parts = torch.randn(5, 300, device=device).to(dtype)
    parts[3] = torch.nan
    places = torch.tensor([[0, 4], [-1, 2], [-1, -1]], device=device)
    out = torch.full((3, 300), torch.nan, device=device)
    spread.sum_placed(parts, places, out)
    close(out[:2], torch.stack((parts[0].float() + parts[4].float(), parts[2].float())))
    assert not out[2].any()
