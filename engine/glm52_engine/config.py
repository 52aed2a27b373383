"""The contract between the operator and the engine, free of torch and of any I/O.

The operator renders an `EngineConfig` into a ConfigMap, the engine reads it back: both sides import this module, so
a field cannot mean two things. Paths, ports, exit codes and the termination message stand here for the same reason.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

API_PORT = 8000
"""TCP port of the HTTP server of every engine and router pod."""

STORE_PORT = 50051
STORE_HEALTH_PORT = 9003
STORE_HEALTHZ = "/health"
"""Of the master of the store of prefixes: Mooncake's own ports and path."""

CONFIG_PATH = "/etc/glm52/config/config.json"
INTERNAL_TOKEN_PATH = "/etc/glm52/internal/token"
TERMINATION_LOG_PATH = "/dev/termination-log"
MODEL_MOUNT = "/models"

STARTUPZ = "/startupz"
LIVEZ = "/livez"
READYZ = "/readyz"

INTERNAL_TOKEN_HEADER = "X-Glm52-Internal-Token"
"""Every /internal/ endpoint refuses a request whose header does not equal the deployment's secret."""

TERMINATION_MESSAGE_LIMIT = 4096
"""Bytes the kubelet keeps of a termination message."""

Role = Literal["prefill", "decode"]
KvCacheDtype = Literal["auto", "bf16", "fp8"]
Preset = Literal["tiny", "demo"]
"""Checkpoints that an engine makes for itself: random weights, and trained ones."""

HiSparseMode = Literal["auto", "always"]
"""Whether contexts lie whole on a GPU as long as they fit in the memory of its hot buffers, or never."""

Accelerator = Literal["cpu", "nvidia"]
"""What engine pods compute on: the pod's cores, or a GPU for each rank."""

Count = Annotated[int, Field(ge=1, le=4096, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Strict):
    """The checkpoint that every engine pod of a deployment serves."""

    name: str = Field(min_length=1, max_length=128, description="Name under /v1/models.")
    path: str = Field(
        min_length=1,
        description="Checkpoint directory inside the pod (config.json, *.safetensors, tokenizer.json).",
    )
    max_model_len: Annotated[int, Field(ge=1, le=1_048_576, strict=True)] = Field(
        description="Most tokens of one request, prompt and output together."
    )
    kv_cache_dtype: KvCacheDtype = Field(
        default="auto", description="How KV is stored: auto is the checkpoint's own dtype; fp8 takes 57 % of bf16."
    )
    weights_gib: Count = Field(description="Host memory for the weights of one pod, GiB; on a CPU they live there.")


class HiSparseConfig(_Strict):
    """Decode reads the few tokens that it attends to from hot buffers; whole contexts lie in host memory."""

    mode: HiSparseMode = Field(
        default="auto",
        description="auto: while all contexts fit whole where the hot buffers would be, they lie there and nothing is "
        "fetched; always: hot buffers also then.",
    )
    device_buffer_size: Annotated[int, Field(ge=1, le=32_767, strict=True)] | None = Field(
        default=None,
        description="Tokens in the hot buffer of one request and layer, at least the model's index_topk; "
        "twice that when not given.",
    )


class StoreConfig(_Strict):
    """The store of prefixes that the pods of some roles keep together."""

    master: str = Field(pattern=r"^[^\s:]+:[0-9]{1,5}$", description="HOST:PORT of the Mooncake master.")
    store_gib: Annotated[int, Field(ge=1, le=65536, strict=True)] = Field(
        description="Host memory that one pod gives to the store, GiB."
    )


class RoleConfig(_Strict):
    """Size of one pod of one role."""

    ranks_per_host: Count = Field(description="Ranks in one pod; each owns its requests and its KV pool.")
    host_pool_gib: Annotated[int, Field(ge=1, le=65536, strict=True)] = Field(
        description="KV pool of one rank in host memory, GiB."
    )
    max_num_seqs: Count = Field(description="Seats of one rank: most requests that run at once.")
    max_waiting: Annotated[int, Field(ge=1, le=65536, strict=True)] = Field(
        default=256, description="Most requests that wait in one pod; more are refused and told when to come again."
    )
    prefix_cache: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Whether prompts that begin alike share KV; of no effect in decode, which computes no prompt.",
    )
    launch_ahead: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Whether a decode step is started before the tokens of the one before are looked at; on GPUs only.",
    )
    gpu_memory_percent: Annotated[int, Field(ge=1, le=100, strict=True)] = Field(
        default=90, description="Share of a GPU's memory that weights and KV may take; the rest is for steps."
    )
    hi_sparse: HiSparseConfig | None = Field(
        default=None, description="Absent: whole contexts lie where attention reads them. For decode only."
    )
    store: StoreConfig | None = Field(
        default=None,
        description="Absent: prefixes are shared within a pod only. Decode gives to it what it has computed, and takes "
        "nothing out.",
    )


NET_DEVICES_PATTERN = r"^(auto|[A-Za-z0-9_.-]+(:[0-9]+)?(,[A-Za-z0-9_.-]+(:[0-9]+)?)*)$"


class KvTransferConfig(_Strict):
    """How KV crosses from prefill to decode."""

    net_devices: str = Field(
        default="auto",
        max_length=1024,
        pattern=NET_DEVICES_PATTERN,
        description="Network devices by name, separated by commas, an RDMA device with its port (mlx5_0:1); auto: "
        "every active one.",
    )
    checksums: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Whether every block that arrives is compared with what it is at prefill: for debugging.",
    )


class DrainConfig(_Strict):
    window_seconds: Annotated[int, Field(ge=0, le=86_400, strict=True)] = Field(
        description="Most seconds that running requests get to finish after a drain begins."
    )


class DiscoveryConfig(_Strict):
    """Where the router finds engine pods: EndpointSlices of two Services in one namespace."""

    namespace: str
    prefill_service: str
    decode_service: str
    prefill_hosts: Count = Field(default=1, description="Pods of one prefill replica; its first one takes requests.")
    decode_hosts: Count = Field(default=1, description="Pods of one decode replica; its first one takes requests.")

    def of(self, role: Role) -> tuple[str, str, int]:
        """Namespace, Service and hosts of a replica."""
        if role == "prefill":
            return self.namespace, self.prefill_service, self.prefill_hosts
        return self.namespace, self.decode_service, self.decode_hosts


def host_index(pod: str, hosts: int) -> int | None:
    """Which host of its replica a pod is, 0 being the leader: pods of a StatefulSet are numbered, and `hosts`
    neighbours form a replica. None for a pod without a number."""
    number = pod.rpartition("-")[2]
    return int(number) % hosts if number.isascii() and number.isdigit() else None


class EngineConfig(_Strict):
    """What the pods of one role, or the routers, are configured with.

    What differs per pod comes from the command line and the environment. A pod gets the section of its own role only:
    a change of the other's size is none of its configuration.
    """

    model: ModelConfig
    prefill: RoleConfig | None = None
    decode: RoleConfig | None = None
    drain: DrainConfig
    accelerator: Accelerator = Field(default="cpu", description="What the pods compute on.")
    kv_transfer: KvTransferConfig | None = Field(
        default=None, description="How KV crosses between pods; absent: by every device, unchecked."
    )
    discovery: DiscoveryConfig | None = Field(
        default=None, description="Absent without Kubernetes: the router is then given URLs."
    )
    block_size: Annotated[int, Field(ge=1, le=1024, strict=True)] = Field(
        default=64, description="Tokens per KV block."
    )

    @field_validator("prefill")
    @classmethod
    def _without_hot_buffers(cls, role: RoleConfig | None) -> RoleConfig | None:
        if role is not None and role.hi_sparse is not None:
            raise ValueError("hi_sparse is for decode: every row of a prompt selects other tokens")
        return role

    def role(self, role: Role) -> RoleConfig:
        """Raises ConfigError where the section is absent."""
        found = self.prefill if role == "prefill" else self.decode
        if found is None:
            raise ConfigError(f"{role}: missing; the configuration of a {role} pod needs this section")
        return found


class ConfigError(Exception):
    """Configuration or checkpoint can never work as given; the message names file, field and remedy."""


def read_engine_config(path: str | Path) -> EngineConfig:
    """Read and check a JSON file; raises ConfigError naming the file and each wrong field."""
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected the engine's config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); expected the engine's config.json") from error
    try:
        return EngineConfig.model_validate(raw)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']} (found {item['input']!r})"
            for item in error.errors()
        )
        raise ConfigError(f"{path}: {wrong}") from error


HOLD_ENV = "GLM52_HOLD"


class Hold(_Strict):
    """What an engine container that starts is told after crashes of its replica: to wait before it loads anything.

    The operator writes it to an annotation of the pod, and the kubelet puts that into the environment at each start.
    """

    until: AwareDatetime | None = Field(default=None, description="When it may start; absent: not in this pod.")
    why: str = ""

    def encode(self) -> str:
        return self.model_dump_json(exclude_none=True)

    @classmethod
    def decode(cls, text: str) -> Hold | None:
        """None for nothing, and for what is no hold: a start must not depend on it."""
        try:
            return cls.model_validate_json(text) if text else None
        except ValidationError:
            return None


class Outcome(enum.StrEnum):
    """Why an engine process ended; the value stands in the termination message."""

    DRAINED = "Drained"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    CRASHED = "Crashed"
    WEDGED = "Wedged"
    CONFIG_REFUSED = "ConfigRefused"


EXIT_CODES: dict[Outcome, int] = {
    Outcome.DRAINED: 0,
    Outcome.CRASHED: 70,  # EX_SOFTWARE
    Outcome.WEDGED: 71,
    Outcome.DRAIN_TIMED_OUT: 75,  # EX_TEMPFAIL
    Outcome.CONFIG_REFUSED: 78,  # EX_CONFIG
}
"""Process exit code of each outcome (numbers after BSD sysexits where one fits)."""


class Termination(BaseModel):
    """The JSON in the pod's termination message: written by the engine, read by the operator."""

    # Read by an operator of another version than the engine's: a field that it does not know must not cost it the rest.
    model_config = ConfigDict(extra="ignore", frozen=True)

    outcome: Outcome
    role: str
    host: str = Field(description="Pod name, or the host name without Kubernetes.")
    message: str
    in_flight: int = Field(default=0, description="Requests that were cut off.")
    marker: str = Field(default="", description="CRASH_<host> after a crash; what log searches look for.")
    rank: int | None = Field(default=None, description="The rank that failed, where one did.")
    code: int = Field(default=0, description="Exit code of the process.")
    log: tuple[str, ...] = Field(default=(), description="The last log lines before a crash, oldest first.")
    consequence: bool = Field(
        default=False, description="Another host of the replica ended, or was told to, and this one with it."
    )

    def encode(self) -> str:
        """JSON of at most TERMINATION_MESSAGE_LIMIT bytes: else the kubelet would cut the JSON itself."""
        kept = self
        text = kept.model_dump_json()
        while len(text.encode()) > TERMINATION_MESSAGE_LIMIT:
            if kept.log:
                # The reason says more than what led to it, and of that the end says most.
                kept = kept.model_copy(update={"log": kept.log[1:]})
            else:
                # JSON escapes can take six bytes a character: cut in steps until it fits.
                kept = kept.model_copy(update={"message": kept.message[: len(kept.message) * 3 // 4 - 1] + "…"})
            text = kept.model_dump_json()
        return text

    @classmethod
    def decode(cls, text: str) -> Termination | None:
        """The message that an engine wrote, or None for anything else (a shell's last words, an empty file)."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None
