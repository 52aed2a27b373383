"""Rows of the cache in FP8: what comes back, and scales that are powers of two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.kernels.cache_rows import LEAST, Fp8Rows, load, quantise, store


@given(st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False), st.integers(0, 2**32))
def test_a_group_s_largest_element_fills_e4m3_and_the_scale_is_a_power_of_two(largest: float, seed: int) -> None:
    x = (torch.rand(256, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * largest
    x[7] = largest
    values, scales = quantise(x)
    assert scales.shape == (2,)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full((2,), 0.5))
    biggest = values.float()[:128].abs().max()
    # 448 is e4m3's largest; below 224 half the scale would have done, but for magnitudes that round up to it.
    assert 224 <= biggest <= 448 or abs(largest) <= LEAST * 2
    wide = values.float() * scales.repeat_interleave(128)
    # Three bits of mantissa; what is smaller than e4m3's least normal number has a fixed step.
    assert ((wide - x).abs() <= x.abs() / 16 + scales.repeat_interleave(128) * 2**-10).all()


@pytest.mark.parametrize("magnitude", [448.0, 448.0001, 224.0, 1.75, 1.7500001])
def test_the_border_between_two_scales(magnitude: float) -> None:
    values, _ = quantise(torch.tensor([magnitude, 0.0]))
    assert 224 <= values.float()[0] <= 448


def test_a_row_of_zeros_and_one_that_is_no_number() -> None:
    values, scales = quantise(torch.zeros(32))
    assert scales.isfinite().all()
    assert (values.float() == 0).all()
    values, scales = quantise(torch.tensor([1.0, torch.nan, torch.inf, 0.0]))
    assert (values.float() * scales).isnan()[1], "a request whose KV is no number must be found out by its logits"


def test_rows_are_written_and_read_where_they_belong() -> None:
    slab = torch.zeros(3, 4, 128 + 4 + 32, dtype=torch.uint8)
    rows = Fp8Rows(
        slab[..., :128].view(torch.float8_e4m3fn),
        slab[..., 128:132].view(torch.float32),
        slab[..., 132:].view(torch.bfloat16),
    )
    x = torch.randn(2, 144)
    blocks, offsets = torch.tensor([2, 0]), torch.tensor([1, 3])
    store(rows, blocks, offsets, x)
    found = load(rows, (blocks, offsets), torch.float32)
    assert torch.equal(found[:, 128:], x[:, 128:].bfloat16().float())
    assert ((found - x).norm(dim=1) / x.norm(dim=1) < 0.05).all()
    touched = slab.any(-1).nonzero().tolist()
    assert touched == [[0, 3], [2, 1]]
    assert torch.equal(load(rows, (blocks,), torch.float32)[0, 1], found[0])
