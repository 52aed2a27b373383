"""Every kernel against plain PyTorch in float32 (and double): small shapes in the interpreter, the model's on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm52_engine.kernels import index, linear, mla, moe, rows
from glm52_engine.kernels.cache_rows import Fp8Rows, Rows, load, quantise
from glm52_engine.kernels.reference import index_scores, select_top_k
from glm52_engine.model.rope import Rotation, rotate

BLOCK_SIZE = 16


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    """Relative error of the whole, as bfloat16 operands allow."""
    assert torch.isfinite(out).all()
    error = (out.double() - want.double()).norm() / want.double().norm()
    assert error < (1e-5 if out.device.type == "cpu" else 1e-2)


@pytest.mark.parametrize("count", [1, 8, 40])
@pytest.mark.parametrize("splits", [1, 4])
def test_linear(device: str, dtype: torch.dtype, gpu: bool, count: int, splits: int) -> None:
    n, k = (2784, 6144) if gpu else (72, 96)
    x = torch.randn(count, k, device=device).to(dtype)
    w = (torch.randn(n, k, device=device) * k**-0.5).to(dtype)
    out = torch.full((splits, count, n), torch.nan, device=device)
    linear.linear(x, w, out, block_k=128 if gpu else 16)
    close(out.sum(0), x.float() @ w.float().T)


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_linear_with_fp8_blocks(device: str, dtype: torch.dtype, gpu: bool, size: float) -> None:
    """Small rows too: on a GPU weights are 2^-120 of themselves on their way."""
    n, k = (576, 6144) if gpu else (160, 256)
    x = (torch.randn(8, k, device=device) * size).to(dtype)
    w = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128), device=device) + 0.5
    out = torch.full((2, 8, n), torch.nan, device=device)
    linear.linear(x, w, out, scale=scale)
    wide = w.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    close(out.sum(0), x.float() @ wide.T)


def test_fp8_blocks_widened(device: str, dtype: torch.dtype) -> None:
    n, k = 160, 200
    w = torch.randn(2, n, k, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, 2, device=device) + 0.5
    out = torch.full((2, n, k), torch.nan, device=device, dtype=dtype)
    linear.widen(w, scale, out)
    wide = w.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :n, :k]
    assert torch.equal(out, wide.to(dtype))


def test_add_norm_adds_rounds_and_norms(device: str, dtype: torch.dtype, gpu: bool) -> None:
    dim = 6144 if gpu else 96
    hidden = torch.randn(5, dim, device=device).to(dtype)
    parts = torch.randn(3, 5, dim, device=device)
    weight = torch.rand(dim, device=device).to(dtype)
    normed = torch.empty_like(hidden)
    want = hidden + parts.sum(0).to(dtype)
    rows.add_norm(hidden, parts, weight, normed, 1e-5)
    close(hidden, want)
    close(normed, F.rms_norm(want.float(), (dim,), weight.float(), 1e-5))


class Paged:
    """Random contexts in a shuffled paged cache."""

    def __init__(self, lengths: list[int], width: int, device: str, dtype: torch.dtype) -> None:
        blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
        order = torch.randperm(blocks, device=device, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.table = torch.zeros(len(lengths), -(-max(lengths) // BLOCK_SIZE), dtype=torch.int32, device=device)
        for row, n in enumerate(lengths):
            need = -(-n // BLOCK_SIZE)
            self.table[row, :need], order = order[:need], order[need:]
        self.cache = torch.randn(blocks, BLOCK_SIZE, width, device=device).to(dtype)

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        return self.table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def context(self, row: int) -> torch.Tensor:
        every = torch.arange(int(self.lengths[row]), device=self.table.device)
        return self.cache.flatten(0, 1)[self.slots(row, every).long()]


def test_index_scores_of_paged_keys(device: str, dtype: torch.dtype, gpu: bool) -> None:
    heads, dim, k, lengths = (32, 128, 2048, [4000, 100, 2049]) if gpu else (16, 32, 16, [37, 9, 17])
    paged = Paged(lengths, dim, device, dtype)
    query = torch.randn(3, heads, dim, device=device).to(dtype)
    weights = torch.randn(3, heads, device=device)
    out = torch.full((3, max(lengths)), torch.nan, device=device)
    index.scores(query, weights, paged.cache, paged.table, paged.lengths, out, top_k=k, block_l=128 if gpu else 16)
    for row in (0, 2):
        want = index_scores(query[row, None, None], weights[row, None, None], paged.context(row)[None])[0, 0]
        close(out[row, : lengths[row]], want)
    assert out[1].isnan().all()


@pytest.mark.parametrize("fp8", [False, True])
def test_index_scores_of_rows_that_share_a_context(device: str, dtype: torch.dtype, gpu: bool, fp8: bool) -> None:
    heads, dim, k, length = (32, 128, 2048, 2300) if gpu else (16, 32, 16, 40)
    paged = Paged([length], dim, device, dtype)
    lengths = torch.arange(length - 5, length + 1, dtype=torch.int32, device=device)
    query = torch.randn(6, heads, dim, device=device).to(dtype)
    weights = torch.randn(6, heads, device=device)
    out = torch.full((6, length), torch.nan, device=device)
    keys: Rows = paged.cache
    if fp8:
        keys = Fp8Rows(*quantise(paged.cache), None)
        every = torch.arange(len(paged.cache), device=device)
        paged.cache = load(keys, (every,), torch.float32)
    counts = index.top_k_counts(6, device)
    table = paged.table.expand(6, -1)
    index.scores(
        query, weights, keys, table, lengths, out, top_k=k, counts=counts[0], together=4,
        block_l=128 if gpu else 16,
    )  # fmt: skip
    want = index_scores(query[None], weights[None], paged.context(0).float()[None])[0]
    for row, n in enumerate(lengths.tolist()):
        close(out[row, :n], want[row, :n])
        assert out[row, n:].isnan().all()
    chosen = [torch.full((6, k), -7, dtype=torch.int32, device=device) for _ in range(2)]
    index.top_k(out, lengths, table, chosen[0], counts, block_size=BLOCK_SIZE, block_rows=BLOCK_SIZE, counted=True)
    anew = counts[1], counts[0].zero_()
    index.top_k(out, lengths, table, chosen[1], anew, block_size=BLOCK_SIZE, block_rows=BLOCK_SIZE)
    assert torch.equal(*chosen), "first digits that were counted with the scores are those of a pass of their own"


@pytest.mark.parametrize("kind", ["random", "plateau", "equal", "both zeros"])
def test_top_k_is_the_reference_s_also_with_ties(device: str, gpu: bool, kind: str) -> None:
    k, lengths = (2048, [70000, 2049, 2048, 3]) if gpu else (32, [200, 33, 32, 3])
    paged = Paged(lengths, 1, device, torch.float32)
    scores = torch.randn(4, max(lengths), device=device)
    if kind == "plateau":
        scores = scores.round().relu() - (scores < -1).float()
    elif kind == "equal":
        scores.fill_(-2.5)
    elif kind == "both zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    out = torch.full((4, k), -7, dtype=torch.int32, device=device)
    counts = index.top_k_counts(4, device)
    for _ in range(3):
        index.top_k(
            scores, paged.lengths, paged.table, out, counts, block_size=BLOCK_SIZE, block_rows=BLOCK_SIZE,
            block_l=4096 if gpu else 64,
        )  # fmt: skip
        counts = counts[1], counts[0]
    for row, length in enumerate(lengths):
        if length > k:
            best = select_top_k(scores[row : row + 1, :length].cpu(), k)[0].to(device)
        else:
            best = torch.arange(length, device=device)
        want = torch.full((k,), -1, dtype=torch.int32, device=device)
        want[: len(best)] = paged.slots(row, best).int()
        assert torch.equal(out[row], want), (kind, length)


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_over_selected_rows(device: str, dtype: torch.dtype, gpu: bool, splits: int) -> None:
    heads, latent, rope, k, lengths = (64, 512, 64, 2048, [4000, 5, 1600]) if gpu else (4, 32, 16, 64, [90, 5, 50])
    paged = Paged(lengths, latent + rope, device, dtype)
    query = torch.randn(3, heads, latent + rope, device=device).to(dtype)
    selected = torch.full((3, k), -1, dtype=torch.int32, device=device)
    out = torch.full((3, heads, latent), torch.nan, device=device, dtype=dtype)
    work = None
    if splits > 1:
        work = (
            torch.full((3, splits, heads, latent), torch.nan, device=device),
            torch.full((3, splits, heads), torch.nan, device=device),
            torch.full((3, splits, heads), torch.nan, device=device),
        )
    for row, length in enumerate(lengths):
        chosen = torch.randperm(length, device=device)[:k].sort().values
        selected[row, : len(chosen)] = paged.slots(row, chosen).int()
    scale = (latent + rope) ** -0.5
    flat = paged.cache.flatten(0, 1)
    mla.attend(query, flat, selected, paged.lengths, out, work, scale=scale, block=32 if gpu else 16)
    if mla.flash_mla_sparse_fwd is not None and gpu:
        flash = torch.full_like(out, torch.nan)
        copies = query.repeat_interleave(splits, 0)
        flash = mla.attend_flash(copies, flat, selected, flash, splits, scale=scale)
        close(flash[2], out[2])  # its last part has fewer rows than the others
        close(flash, out)
    for row in range(3):
        kv = flat[selected[row][selected[row] >= 0].long()].float()
        weights = (query[row].float() @ kv.T * scale).softmax(-1)
        close(out[row], weights @ kv[:, :latent])


def fp8_pages(cache: torch.Tensor, latent: int) -> tuple[Fp8Rows, torch.Tensor]:
    """The flat rows of a cache in FP8, and the bytes that hold them: uint8 [rows, row bytes]."""
    flat = cache.flatten(0, 1)
    values, scales = quantise(flat[:, :latent])
    parts = values.view(torch.uint8), scales.view(torch.uint8), flat[:, latent:].bfloat16().view(torch.uint8)
    raw = torch.cat(parts, 1)
    behind = latent + scales.shape[1] * 4
    return Fp8Rows(
        raw[:, :latent].view(torch.float8_e4m3fn),
        raw[:, latent:behind].view(torch.float32),
        raw[:, behind:].view(torch.bfloat16),
    ), raw


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_over_fp8_rows(device: str, dtype: torch.dtype, gpu: bool, splits: int) -> None:
    heads, latent, rope, k, lengths = (64, 512, 64, 2048, [4000, 5, 1600]) if gpu else (4, 256, 16, 64, [90, 5, 50])
    paged = Paged(lengths, latent + rope, device, dtype)
    query = torch.randn(3, heads, latent + rope, device=device).to(dtype)
    selected = torch.full((3, k), -1, dtype=torch.int32, device=device)
    for row, length in enumerate(lengths):
        chosen = torch.randperm(length, device=device)[:k].sort().values
        selected[row, : len(chosen)] = paged.slots(row, chosen).int()
    flat, raw = fp8_pages(paged.cache, latent)
    wide = load(flat, (torch.arange(len(raw), device=device),), dtype)
    scale = (latent + rope) ** -0.5
    out, want = (torch.full((3, heads, latent), torch.nan, device=device, dtype=dtype) for _ in range(2))
    work = None
    if splits > 1:
        peaks = [torch.full((3, splits, heads), torch.nan, device=device) for _ in range(2)]
        work = (torch.full((3, splits, heads, latent), torch.nan, device=device), *peaks)
    block = 32 if gpu else 16
    mla.attend(query, wide, selected, paged.lengths, want, work, scale=scale, block=block)
    mla.attend(query, flat, selected, paged.lengths, out, work, scale=scale, block=block)
    close(out, want)
    if mla.flash_mla_sparse_fwd is not None and gpu:
        pages = F.pad(raw, (0, 0, 0, -len(raw) % mla.FLASH_PAGE)).view(-1, mla.FLASH_PAGE, 1, raw.shape[1])
        flash = mla.FlashFp8()
        for _ in range(2):
            close(flash.attend(query, pages, selected, latent=latent, scale=scale), want)


def test_fp8_rows_of_whole_sequences_widened(device: str, dtype: torch.dtype, gpu: bool) -> None:
    latent, rope, lengths = (512, 64, [100, 40]) if gpu else (256, 16, [40, 20])
    paged = Paged(lengths, latent + rope, device, dtype)
    flat, _ = fp8_pages(paged.cache, latent)
    out = torch.full((2, paged.table.shape[1] * BLOCK_SIZE, latent + rope), torch.nan, device=device, dtype=dtype)
    mla.widen_rows(flat, paged.table, out, block_size=BLOCK_SIZE, block_rows=BLOCK_SIZE)
    for row, length in enumerate(lengths):
        slots = paged.slots(row, torch.arange(length, device=device)).long()
        assert torch.equal(out[row, :length], load(flat, (slots,), dtype))


def test_rows_written_in_fp8_are_the_reference_s(device: str, dtype: torch.dtype, gpu: bool) -> None:
    q_dim, latent, rope, dim, heads = (2048, 512, 64, 128, 32) if gpu else (64, 256, 16, 32, 4)
    count, bs, block_rows = 3, 4, 7
    a = torch.randn(2, count, q_dim + latent + rope + dim + heads, device=device)
    angle = torch.rand(count, rope // 2, device=device) * 6
    by = Rotation(angle.cos(), angle.sin())
    empty = torch.zeros(5 * block_rows, 1, latent + rope, device=device)
    pool, raw = fp8_pages(empty, latent)
    keys = Fp8Rows(*quantise(torch.zeros(5, bs, dim, device=device)), None)
    ones = lambda n: torch.rand(n, device=device).to(dtype) + 0.5  # noqa: E731
    norms, key_norm = rows.Norms(ones(q_dim), ones(latent)), (ones(dim), ones(dim))
    slots = torch.tensor([2 * block_rows + 3, -1, 1], dtype=torch.int32, device=device)
    q_out = torch.empty(count, q_dim, device=device, dtype=dtype)
    head_weights = torch.empty(count, heads, device=device)
    index_row = rows.IndexRow(*key_norm, keys, head_weights, 1.0)
    before, key_before = raw.clone(), keys.values.view(torch.uint8).clone()
    rows.latents(a, q_out, rows.Place(slots, by.cos, by.sin, pool, block_rows), norms, index_row, eps=1e-6)

    kv, shared, key = a.sum(0)[:, q_dim:].split([latent, rope, dim + heads], 1)
    kv = F.rms_norm(kv, (latent,), None, 1e-6).to(dtype) * norms.kv
    key = F.layer_norm(key[:, :dim], (dim,), key_norm[0].float(), key_norm[1].float(), 1e-6)
    key = torch.cat((rotate(key[:, :rope], by), key[:, rope:]), 1)
    for row, (slot, block, offset) in {0: (2 * block_rows + 3, 2, 3), 2: (1, 0, 1)}.items():
        values, scales = quantise(kv[row].to(dtype))
        assert torch.equal(pool.scales[slot], scales)
        close(pool.values[slot].float(), values.float())
        assert pool.rest is not None
        close(pool.rest[slot].float(), rotate(shared[row : row + 1], Rotation(by.cos[row], by.sin[row])).bfloat16()[0])
        values, scales = quantise(key[row].to(dtype))
        assert torch.equal(keys.scales[block, offset], scales)
        close(keys.values[block, offset].float(), values.float())
    assert sorted((raw != before).any(1).nonzero().flatten().tolist()) == [1, 2 * block_rows + 3]
    changed = (keys.values.view(torch.uint8) != key_before).any(-1).nonzero().tolist()
    assert changed == [[0, 1], [2, 3]], "a padding row writes nothing"


def test_queries_into_the_latent_space_and_values_out_of_it(device: str, dtype: torch.dtype, gpu: bool) -> None:
    heads, nope, rope, latent, value = (64, 192, 64, 512, 256) if gpu else (4, 16, 16, 32, 16)
    index_heads, index_dim = (32, 128) if gpu else (8, 32)
    count, splits = 5, 2
    b = torch.randn(splits, count, heads * (nope + rope) + index_heads * index_dim, device=device)
    kv_b = (torch.randn(heads * (nope + value), latent, device=device) * 0.1).to(dtype)
    angle = torch.rand(count, rope // 2, device=device) * 6
    by = Rotation(angle.cos(), angle.sin())
    query = torch.full((count, heads, latent + rope), torch.nan, device=device, dtype=dtype)
    index_query = torch.full((count, index_heads, index_dim), torch.nan, device=device, dtype=dtype)
    mla.absorb(b, kv_b, by.cos, by.sin, query, index_query, nope=nope, value=value)
    whole = b.sum(0)
    q = whole[:, : heads * (nope + rope)].unflatten(1, (heads, nope + rope))
    expand = kv_b.float().view(heads, nope + value, latent)
    close(query[..., :latent], torch.einsum("thd,hdl->thl", q[..., :nope], expand[:, :nope]))
    close(query[..., latent:], rotate(q[..., nope:], by))
    iq = whole[:, heads * (nope + rope) :].unflatten(1, (index_heads, index_dim))
    close(index_query, torch.cat((rotate(iq[..., :rope], by), iq[..., rope:]), -1))

    attended = torch.randn(count, heads, latent, device=device).to(dtype)
    out = torch.full((count, heads, value), torch.nan, device=device, dtype=dtype)
    mla.expand(attended, kv_b, out, nope=nope)
    close(out, torch.einsum("thl,hvl->thv", attended.float(), expand[:, nope:]))


@pytest.mark.parametrize(("count", "fp8"), [(1, False), (12, False), (40, False), (12, True)])
def test_experts(device: str, dtype: torch.dtype, gpu: bool, count: int, fp8: bool) -> None:
    dim, inner, experts, top = (6144, 2048, 32, 8) if gpu else (256, 128, 6, 2)
    live = max(1, count - 2)
    x = torch.randn(count, dim, device=device).to(dtype)
    gate = (torch.randn(experts, dim, device=device) * dim**-0.5).to(dtype)
    bias = torch.randn(experts, device=device) * 0.2
    w_up = (torch.randn(experts + 1, 2 * inner, dim, device=device) * dim**-0.5).to(dtype)
    w_down = (torch.randn(experts + 1, dim, inner, device=device) * inner**-0.5).to(dtype)
    s_up = s_down = None
    if fp8:
        s_up = torch.rand(experts + 1, 2 * inner // 128, dim // 128, device=device) + 0.5
        s_down = torch.rand(experts + 1, dim // 128, inner // 128, device=device) + 0.5
        w_up, w_down = w_up.to(torch.float8_e4m3fn), w_down.to(torch.float8_e4m3fn)
    routed = moe.Routed(count, experts, top, device)
    active = torch.full((), live, dtype=torch.int32, device=device)
    moe.route(x, gate, bias, active, routed, scaling=2.5, normalise=True)
    gated = torch.full((count, top + 1, inner), torch.nan, device=device, dtype=dtype)
    out = torch.full((count, top + 1, dim), torch.nan, device=device, dtype=dtype)
    moe.up(x, w_up, gated, routed, scale=s_up)
    moe.down(gated, w_down, out, routed, scale=s_down)

    score = (x.float() @ gate.float().T).sigmoid()[:live]
    best = (score + bias).topk(top).indices
    weight = score.gather(1, best)
    weight = weight / weight.sum(1, keepdim=True) * 2.5
    wide = lambda w, s: w.float() if s is None else w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)  # noqa: E731
    up_w, down_w = wide(w_up, s_up), wide(w_down, s_down)
    want = torch.zeros(live, dim, device=device)
    for row in range(live):
        for expert, by in [*zip(best[row].tolist(), weight[row].tolist(), strict=True), (experts, 1.0)]:
            both = up_w[expert] @ x[row].float()
            want[row] += by * (down_w[expert] @ (F.silu(both[:inner]) * both[inner:]))
    close(out[:live].float().sum(1), want)
    assert out[live:].isnan().all(), "padding rows reach no expert"


def test_feed_takes_the_lowest_of_the_greatest_and_names_rows_that_are_no_numbers(device: str) -> None:
    logits = torch.zeros(6, 50, device=device)
    logits[0, [7, 9]] = 2.0
    logits[1, 45] = 9.0  # behind the bound
    logits[2, 3] = float("nan")
    logits[3, 4] = float("inf")
    logits[4, :] = float("-inf")
    logits[5, 8] = 1.0  # a padding row
    tokens = torch.full((6,), 33, dtype=torch.int64, device=device)
    positions = torch.arange(6, device=device)
    lengths = torch.arange(1, 7, dtype=torch.int32, device=device)
    out = torch.full((2, 6), 99, dtype=torch.int32, device=device)
    active = torch.full((), 5, dtype=torch.int32, device=device)
    turn = torch.ones((), dtype=torch.int32, device=device)
    rows.feed(logits, tokens, positions, lengths, out, active, turn, vocab_bound=40)
    assert out.tolist() == [[99] * 6, [7, 0, -1, -1, -1, 8]]
    assert tokens.tolist() == [7, 0, 0, 0, 0, 33]
    assert positions.tolist() == [1, 2, 3, 4, 5, 5]
    assert lengths.tolist() == [2, 3, 4, 5, 6, 6]
