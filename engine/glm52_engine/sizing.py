"""Memory and time budgets as pure arithmetic: the operator asks for them, the engine's preflight checks them.

All sizes are bytes unless a name says GiB. Sources of the constants stand beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm52_engine.config import Accelerator, DrainConfig, RoleConfig

GIB = 1 << 30
MIB = 1 << 20

SHARED_MEMORY = 256 * MIB
"""/dev/shm of a pod: UCX and torch use it; pages there count against the pod's memory limit."""

PROCESS_OVERHEAD = 1536 * MIB
"""One engine process: interpreter, torch and its libraries, HTTP, activations."""

RANK_OVERHEAD = 256 * MIB
"""Per rank: step buffers, logits of one step, block tables."""

GPU_OVERHEAD = 1 * GIB
"""Per rank on a GPU: the driver's memory on the host, compiled kernels, pinned buffers. A whole process with one rank
on an H200 took 1.27 GiB beside its pool."""

STORE_OVERHEAD = 512 * MIB
"""Where a pod takes part in the store of prefixes: the client's process, 80 MiB with its library, and two stages of
64 MiB; the rest is for the books that it keeps of its part of the store."""

STORE_MASTER_MEMORY = 512 * MIB
"""Of the store's master: it keeps names and places, no blocks. 60 MiB when empty."""

ROUTER_MEMORY = 512 * MIB
"""Of a router pod."""

ROUTER_BODY_BYTES = ROUTER_MEMORY // 2
"""Clients' bodies that a router holds at one time; the other half is for itself and what a body becomes when parsed."""

PROPAGATION_SECONDS = 5
"""Seconds for routers and proxies to learn that a pod no longer takes requests."""

UNPIN_SECONDS_PER_GIB = 0.1
"""Releasing pinned memory: registering takes about 70 s a TB on such machines, releasing no longer; rounded up."""

SHUTDOWN_MARGIN_SECONDS = 15

START_SECONDS = 120
"""Import, connect, first forward: what a start takes beside reading weights and touching the pool."""

GPU_START_SECONDS = 300
"""More on a GPU: kernels are compiled and steps captured for every bucket. Five buckets of a small model took 34 s; a
large one has twice as many, and a cache of compiled kernels begins empty in a new pod."""

LOAD_SECONDS_PER_GIB = 5
"""Reading weights: 0.2 GiB/s is a slow network volume."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What one pod of a role needs in host memory, by cause; bytes."""

    ranks: int
    host_pool: int
    store: int
    weights: int
    shared_memory: int
    overhead: int

    @property
    def host_pools(self) -> int:
        return self.ranks * self.host_pool

    @property
    def per_host(self) -> int:
        return self.host_pools + self.store + self.weights + self.shared_memory + self.overhead

    def explain(self) -> str:
        """The sum written out, the same text in a condition and in the preflight's refusal."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        store = f" + {gib(self.store)} store" if self.store else ""
        return (
            f"{gib(self.per_host)} = {ranks} × {gib(self.host_pool)} host pool{store}"
            f" + {gib(self.weights)} weights + {gib(self.shared_memory)} shared memory + {gib(self.overhead)} overhead"
        )


def gib(size: int) -> str:
    """Bytes as GiB with at most two decimals: `4 GiB`, `1.75 GiB`."""
    return f"{size / GIB:.2f}".rstrip("0").rstrip(".") + " GiB"


def host_memory(role: RoleConfig, *, weights_gib: int, accelerator: Accelerator) -> HostMemory:
    """Memory request = limit of one pod: ranks × host pool + store + weights + shared memory + overhead.

    On GPUs the weights are not in host memory: they pass through one small buffer.
    """
    cpu = accelerator == "cpu"
    own = RANK_OVERHEAD if cpu else RANK_OVERHEAD + GPU_OVERHEAD
    return HostMemory(
        ranks=role.ranks_per_host,
        host_pool=role.host_pool_gib * GIB,
        store=role.store.store_gib * GIB if role.store else 0,
        weights=weights_gib * GIB if cpu else 0,
        shared_memory=SHARED_MEMORY,
        overhead=PROCESS_OVERHEAD + role.ranks_per_host * own + (STORE_OVERHEAD if role.store else 0),
    )


def unpin_seconds(role: RoleConfig) -> int:
    """Upper bound of releasing every pool of one pod."""
    return int(role.ranks_per_host * role.host_pool_gib * UNPIN_SECONDS_PER_GIB) + 1


def stop_seconds(role: RoleConfig) -> int:
    """The end of a pod that has nothing to drain = unpin + margin: no SIGKILL meets a running unpin."""
    return unpin_seconds(role) + SHUTDOWN_MARGIN_SECONDS


def grace_period_seconds(role: RoleConfig, drain: DrainConfig) -> int:
    """terminationGracePeriodSeconds = propagation + drain window + what a pod with nothing to drain takes."""
    return PROPAGATION_SECONDS + drain.window_seconds + stop_seconds(role)


def startup_budget_seconds(role: RoleConfig, *, weights_gib: int, accelerator: Accelerator) -> int:
    """Seconds a start may take before the startup probe gives up: base + reading weights + touching the pools."""
    pools = role.ranks_per_host * role.host_pool_gib
    base = START_SECONDS + (0 if accelerator == "cpu" else GPU_START_SECONDS)
    return base + LOAD_SECONDS_PER_GIB * weights_gib + pools


def kv_token_bytes(*, layers: int, mla_row: int, full_layers: int, index_row: int) -> int:
    """Bytes of one token's KV: an MLA row in every layer, an index key in every layer with its own indexer."""
    return layers * mla_row + full_layers * index_row


def pool_blocks(pool: int, *, block_bytes: int) -> int:
    """Whole blocks that fit a pool of `pool` bytes."""
    return pool // block_bytes
