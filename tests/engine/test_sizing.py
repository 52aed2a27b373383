"""The arithmetic of memory and time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm52_engine import sizing
from glm52_engine.config import DrainConfig, RoleConfig
from glm52_engine.sizing import GIB

roles = st.builds(
    RoleConfig,
    ranks_per_host=st.integers(1, 64),
    host_pool_gib=st.integers(1, 1024),
    max_num_seqs=st.just(1),
)


@given(roles, st.integers(1, 1024))
def test_memory_is_ranks_times_pool_and_the_rest(role: RoleConfig, weights: int) -> None:
    memory = sizing.host_memory(role, weights_gib=weights, accelerator="cpu")
    assert memory.host_pools == role.ranks_per_host * role.host_pool_gib * GIB
    rest = memory.weights + memory.shared_memory + memory.overhead
    assert memory.per_host == memory.host_pools + rest
    assert rest > weights * GIB


def test_the_sum_is_written_out() -> None:
    role = RoleConfig(ranks_per_host=8, host_pool_gib=160, max_num_seqs=96)
    text = sizing.host_memory(role, weights_gib=4, accelerator="cpu").explain()
    assert text == (
        "1287.75 GiB = 8 ranks × 160 GiB host pool + 4 GiB weights + 0.25 GiB shared memory + 3.5 GiB overhead"
    )


@given(roles, st.integers(0, 86_400))
def test_grace_covers_drain_and_unpin(role: RoleConfig, window: int) -> None:
    grace = sizing.grace_period_seconds(role, DrainConfig(window_seconds=window))
    unpin = role.ranks_per_host * role.host_pool_gib * sizing.UNPIN_SECONDS_PER_GIB
    assert grace > sizing.PROPAGATION_SECONDS + window + unpin


def test_a_pool_holds_the_tokens_that_the_published_rows_give() -> None:
    # GLM-5.2, 78 layers of bf16 MLA rows of 1,152 bytes, no index keys in the host pool, blocks of 64 tokens.
    token = sizing.kv_token_bytes(layers=78, mla_row=1152, full_layers=21, index_row=0)
    assert token == 89_856
    assert sizing.pool_blocks(160 * GIB, block_bytes=64 * token) * 64 == 1_911_872
