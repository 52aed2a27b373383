"""The Triton forms of `residency.py`: resolve, gather from pinned host memory, write back to it. Graph-safe.

Host memory is read by the GPU itself, row by row: a copy engine would need the list of rows on the host, which is where
no decision of a step may be made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels.chain import CHAINED, after_previous
from glm52_engine.kernels.residency import COUNTERS, POISON, HostRows, Plan, Residency

WORD = 4
"""Bytes that a lane counts in; four words in a row are one access of 16 bytes."""


@triton.jit
def _begin(seats, active, newest, count, batch, stride, groups, BT: tl.constexpr, BG: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.arange(0, BT)
    seat = tl.load(seats + row, row < batch, other=0)
    tl.store(newest + row, tl.where(row < tl.load(active), (seat + 1) * stride - 1, -1), row < batch)
    group = tl.arange(0, BG)
    tl.store(count + group, 0, group < groups)


def begin(residency: Residency, seats: torch.Tensor, active: torch.Tensor, plan: Plan) -> None:
    """See `residency.begin`."""
    batch, groups = len(seats), len(plan.count)
    _begin[(1,)](
        seats, active, plan.newest, plan.count, batch, residency.stride, groups,
        BT=triton.next_power_of_2(batch), BG=triton.next_power_of_2(groups), num_warps=4, **CHAINED,
    )  # fmt: skip


@triton.jit
def _begin_whole(
    frames, positions, active, newest, batch, frame_row, block_size, BT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_previous(PDL)
    row = tl.arange(0, BT)
    position = tl.load(positions + row, row < batch, other=0)
    frame = tl.load(frames + row * frame_row + position // block_size, row < batch, other=0)
    place = frame * block_size + (position % block_size).to(tl.int32)
    tl.store(newest + row, tl.where(row < tl.load(active), place, -1), row < batch)


def begin_whole(
    frames: torch.Tensor, positions: torch.Tensor, active: torch.Tensor, plan: Plan, *, block_size: int
) -> None:
    """See `residency.begin_whole`."""
    batch = len(positions)
    _begin_whole[(1,)](
        frames, positions, active, plan.newest, batch, frames.stride(0), block_size,
        BT=triton.next_power_of_2(batch), num_warps=4, **CHAINED,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["where", "count"])
def _resolve(
    seats, selected, own, active, owner, order, where, used, counters, resident, plan_slots, plan_rows, count,
    slots, K: tl.constexpr, H: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BK)
    if row < tl.load(active):
        seat = tl.load(seats + row).to(tl.int64)
        owner += seat * H
        order += seat * H
        used += seat * H
        slot = tl.load(selected + row * K + lane, lane < K, other=-1)
        written = tl.load(own + row)
        newest = (slot >= 0) & (slot == written)
        asked = (slot >= 0) & (slot != written)
        inside = asked & (slot < slots)
        held = tl.load(where + slot, inside, other=-1).to(tl.int32)
        tag = tl.load(owner + held, held >= 0, other=-1)
        hit = inside & (held >= 0) & (tag == slot)
        miss = asked & (tag != slot)
        old = tl.load(where + written, (written >= 0) & (written < slots), other=-1).to(tl.int32)
        dropped = (old >= 0) & (tl.load(owner + old, old >= 0, other=-1) == written)
        tl.store(used + held, 1, hit)
        misses = tl.sum(miss.to(tl.int32), 0)
        ordinal = tl.cumsum(miss.to(tl.int32), 0) - 1
        # Which thread has an element depends on the access: a load and a store of the same words are not the same
        # thread's. So between two accesses of a tensor of which one writes stands a barrier.
        tl.debug_barrier()

        at = tl.arange(0, BH)
        kept = tl.load(order + at, at < H, other=0).to(tl.int32)
        unused = (at < H) & (tl.load(used + kept, at < H, other=1) == 0)
        rank = tl.cumsum(unused.to(tl.int32), 0)
        total = tl.sum(unused.to(tl.int32), 0)
        shift = tl.where(rank <= misses, total - misses, -misses)
        place = tl.where(unused, shift + rank - 1, total + at - rank)
        tl.debug_barrier()
        tl.store(used + kept, 0, at < H)
        tl.store(order + place, kept, at < H)
        tl.store(owner + old, -1, dropped)
        tl.debug_barrier()

        taken = tl.load(order + total - misses + ordinal, miss, other=0).to(tl.int32)
        lost = tl.sum((tl.load(owner + taken, miss, other=-1) >= 0).to(tl.int64), 0)
        tl.debug_barrier()
        tl.store(owner + taken, tl.where(inside, slot, -1), miss)
        tl.store(where + slot, taken, miss & inside)
        here = tl.where(newest, H, tl.where(hit, held, taken))
        here = tl.where(asked | newest, seat.to(tl.int32) * (H + 1) + here, -1)
        tl.store(resident + row * K + lane, here, lane < K)
        first = tl.atomic_add(count, misses, sem="relaxed")
        tl.store(plan_slots + first + ordinal, tl.where(inside, slot, -1), miss)
        tl.store(plan_rows + first + ordinal, here, miss)
        tl.atomic_add(counters, tl.sum(hit.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(counters + 1, misses.to(tl.int64), sem="relaxed")
        came = tl.sum((miss & inside).to(tl.int64), 0)
        tl.atomic_add(counters + 2, misses.to(tl.int64) - came, sem="relaxed")
        tl.atomic_add(counters + 5, lost, sem="relaxed")
        tl.atomic_add(counters + 6, came - lost - dropped.to(tl.int64), sem="relaxed")
    else:
        tl.store(resident + row * K + lane, -1, lane < K)


def resolve(
    residency: Residency, group: int, seats: torch.Tensor, selected: torch.Tensor, own: torch.Tensor,
    active: torch.Tensor, plan: Plan, *, warps: int = 16,
) -> None:  # fmt: skip
    """See `residency.resolve`. One program a row: the order of a hot buffer is one chain of decisions."""
    batch, k = selected.shape
    block_k, block_h = triton.next_power_of_2(k), triton.next_power_of_2(residency.rows)
    _resolve[(batch,)](
        seats, selected, own, active, residency.owner[group], residency.order[group], residency.where[group],
        residency.used, residency.counters, plan.resident, plan.slots, plan.rows, plan.count[group:],
        residency.slots, K=k, H=residency.rows, BK=block_k, BH=block_h,
        num_warps=max(1, min(warps, block_h // 32)), **CHAINED,
    )  # fmt: skip


_ALONE, _BESIDE = (132, 1024, 8), (12, 1024, 8)
"""Programs, chunks a turn and warps, measured on an H200, beside in whole steps of 32 rows.

Beside compute, every multiprocessor that fetches is one whose own part of a product comes late, and the product ends
with its last part: rows dealt out over 132 of them, two at a time, cost as much as with no overlap at all, by copies of
the bulk engine too.
"""

_FEW, _MANY = 8, 20 << 20
"""Programs that fetch beside compute while there are at most so many bytes: a slow stream that compute still covers."""


@triton.jit(do_not_specialize_on_alignment=["count"])
def _gather(
    slots, rows, count, host, hot, counters, block_chunks, layer_chunks, hot_chunks,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, BC: tl.constexpr, UNWRITTEN: tl.constexpr, FETCHED: tl.constexpr,
    DEBUG: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    chunks: tl.constexpr = WORDS // 4
    total = tl.load(count) * chunks
    programs = tl.num_programs(0)
    if FEW < MANY:
        programs = tl.where(total > MANY, programs, tl.minimum(programs, FEW))
    layer = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.atomic_add(counters + FETCHED, tl.load(count).to(tl.int64), sem="relaxed")
    host += layer * layer_chunks * 4
    hot += layer * hot_chunks * 4
    word = tl.arange(0, 4)
    last = tl.where(tl.program_id(0) < programs, total, 0)
    for start in range(tl.program_id(0) * BC, last, programs * BC):
        chunk = start + tl.arange(0, BC)
        there = chunk < total
        entry = chunk // chunks
        part = (chunk % chunks) * 4
        slot = tl.load(slots + entry, there, other=-1)
        row = tl.load(rows + entry, there, other=0).to(tl.int64)
        found = there & (slot >= 0)
        at = (slot // BLOCK_SIZE).to(tl.int64) * block_chunks * 4 + (slot % BLOCK_SIZE) * WORDS + part
        value = tl.load(host + at[:, None] + word[None, :], found[:, None], other=0)
        into = hot + row * WORDS + part
        tl.store(into[:, None] + word[None, :], value, there[:, None])
        if DEBUG:
            # Counted once a row: its last chunk stands for it, since rows are written whole.
            poisoned = found & (part == WORDS - 4) & (tl.min((value == UNWRITTEN).to(tl.int32), 1) == 1)
            tl.atomic_add(counters + FETCHED + 1, tl.sum(poisoned.to(tl.int64), 0), sem="relaxed")


def gather(
    residency: Residency, group: int, plan: Plan, host: HostRows, hot: torch.Tensor, layers: range, *,
    debug: bool = False, beside: bool = False, programs: int | None = None, block: int | None = None,
    warps: int | None = None,
) -> None:  # fmt: skip
    """See `residency.gather`; hot uint8 [layers, rows, row_bytes]; one launch for all of `layers`.

    Chunks of 16 bytes of all rows are dealt out over the programs, so that rows of 41 chunks (656 bytes) waste no lane.
    Never chained to the kernel before: that may be another stream's.
    """
    if not layers:
        return
    usual = _BESIDE if beside else _ALONE
    programs, block, warps = programs or usual[0], block or usual[1], warps or usual[2]
    most = triton.cdiv(len(plan.slots) * host.row_bytes, block * 16)
    _gather[(min(programs, most), len(layers))](
        plan.slots, plan.rows, plan.count[group:], *_rows(host, hot, layers), residency.counters,
        *_chunks(host, hot), BLOCK_SIZE=host.block_size, WORDS=host.row_bytes // WORD, BC=block, UNWRITTEN=_POISON_WORD,
        FETCHED=COUNTERS.index("fetched"), DEBUG=debug, FEW=_FEW if beside else 0, MANY=_MANY // 16 if beside else 0,
        num_warps=warps,
    )  # fmt: skip


@triton.jit
def _copy_blocks(ids, source, into, source_chunks, into_chunks, CHUNKS: tl.constexpr, BC: tl.constexpr):
    block = tl.load(ids + tl.program_id(0))
    source += block * source_chunks * 4
    into += block * into_chunks * 4
    word = tl.arange(0, 4)
    for start in range(0, CHUNKS, BC):
        chunk = start + tl.arange(0, BC)
        there = (chunk < CHUNKS)[:, None]
        at = chunk[:, None] * 4 + word[None, :]
        tl.store(into + at, tl.load(source + at, there, other=0), there)


def copy_blocks(ids: torch.Tensor, source: torch.Tensor, into: torch.Tensor) -> None:
    """See `residency.copy_blocks`; ids on the GPU, host memory pinned, width and strides multiples of 16 bytes.

    A launch for all blocks: copies of single ones cost the host more than a long context's take.
    """
    count, width = len(ids), source.shape[1]
    if not count or not width:
        return
    _copy_blocks[(count,)](
        ids, source.view(torch.int32), into.view(torch.int32), source.stride(0) // 16, into.stride(0) // 16,
        CHUNKS=width // 16, BC=512, num_warps=8,
    )  # fmt: skip


@triton.jit
def _write_back(
    newest, own, active, host, hot, slots, block_chunks, layer_chunks, hot_chunks,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(own + row)
    if (row < tl.load(active)) & (slot >= 0) & (slot < slots):
        word = tl.arange(0, BW)
        value = tl.load(hot + layer * hot_chunks * 4 + tl.load(newest + row).to(tl.int64) * WORDS + word, word < WORDS)
        at = (slot // BLOCK_SIZE).to(tl.int64) * block_chunks * 4 + (slot % BLOCK_SIZE) * WORDS
        tl.store(host + layer * layer_chunks * 4 + at + word, value, word < WORDS)


def write_back(
    plan: Plan, own: torch.Tensor, active: torch.Tensor, host: HostRows, hot: torch.Tensor, layers: range
) -> None:  # fmt: skip
    """See `residency.write_back`; one launch for all of `layers`, chained to no other."""
    words = host.row_bytes // WORD
    _write_back[(len(own), len(layers))](
        plan.newest, own, active, *_rows(host, hot, layers), host.slots, *_chunks(host, hot),
        BLOCK_SIZE=host.block_size, WORDS=words, BW=triton.next_power_of_2(words), num_warps=2,
    )  # fmt: skip


_POISON_WORD = int.from_bytes(bytes([POISON]) * WORD, "little", signed=True)


def _rows(host: HostRows, hot: torch.Tensor, layers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of host and hot memory from the first of the layers on."""
    first = layers[0] * host.block_size * host.row_bytes
    return host.tensor.view(-1)[first:].view(torch.int32), hot[layers[0] :].view(-1).view(torch.int32)


def _chunks(host: HostRows, hot: torch.Tensor) -> tuple[int, int, int]:
    """From one block, layer of a block and layer of the hot buffers to the next, in units of 16 bytes."""
    return host.tensor.shape[1] // 16, host.block_size * host.row_bytes // 16, hot.stride(0) // 16
