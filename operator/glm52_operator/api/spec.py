"""What a person asks for: source of the CRD's schema, and what the operator reads `spec` through.

A rule that a schema can say stands in the field; a rule over several fields is a CEL rule in `rules(...)`, checked by
the API server at apply.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from glm52_engine.config import MODEL_MOUNT, NET_DEVICES_PATTERN, Accelerator, HiSparseMode, KvCacheDtype, Preset
from glm52_operator.api.base import Base, Rule, config, rules

Volume = Annotated[
    dict[str, Any],
    Field(
        min_length=1,
        max_length=1,
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    ),
]

_PATH_RULE = (
    f"!has(self.path) || ((self.path == '{MODEL_MOUNT}' || self.path.startsWith('{MODEL_MOUNT}/'))"
    " && !self.path.split('/').exists(part, part == '..'))"
)


class Model(Base):
    """The checkpoint to serve and what it may be asked."""

    model_config = config(
        **rules(
            Rule(
                "has(self.preset) != has(self.path)",
                "exactly one of model.preset (a small checkpoint made in the pod) and model.path (a checkpoint "
                "directory on model.volume) must be set",
            ),
            Rule(
                "has(self.path) == has(self.volume)",
                f"model.path and model.volume belong together: the volume is mounted at {MODEL_MOUNT} and the path "
                "names "
                "the checkpoint directory in it; model.preset takes neither",
            ),
            Rule(
                _PATH_RULE,
                f"model.path must be {MODEL_MOUNT} or a directory under it, without '..': model.volume is mounted "
                "there",
                ".path",
            ),
        )
    )

    name: str = Field(
        default="glm-5.2",
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
        description="Name under which the model is served in /v1/models and asked for in requests.",
    )
    preset: Preset | None = Field(
        default=None,
        description="A small checkpoint of the GLM-5.2 architecture, made by an init container of every engine pod. "
        "demo is trained and answers questions about glm52; tiny has random weights, and its answers are noise. "
        "Excludes path and volume.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description=f"Checkpoint directory inside the pod, under {MODEL_MOUNT}, where volume is mounted.",
    )
    volume: Volume | None = Field(
        default=None,
        description=f"Source of the volume with the checkpoint: exactly one core/v1 volume source, for example "
        f"persistentVolumeClaim, hostPath or nfs. Mounted read-only at {MODEL_MOUNT}.",
    )
    max_model_len: int = Field(
        default=4096, ge=1, le=1_048_576, description="Most tokens of one request, prompt and answer together."
    )
    kv_cache_dtype: KvCacheDtype = Field(
        default="auto",
        description="How prefill and decode store KV: auto is the checkpoint's own dtype; fp8 takes 57 % of bf16's "
        "memory and transfer, and its answers differ a little.",
    )
    weights_gib: int = Field(
        alias="weightsGiB",
        default=1,
        ge=1,
        le=4096,
        description="Host memory that the weights take in one engine pod, GiB; part of the pod's memory request.",
    )


class RoleSpec(Base):
    """Size of one role."""

    replicas: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Number of replicas of the role; with 0 no request can be served.",
    )
    hosts_per_replica: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Pods that form one replica: the ranks of all of them share the experts. Its first pod takes the "
        "requests; they start, drain and are replaced together.",
    )
    ranks_per_host: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks in one pod; each owns its requests and a KV pool of hostPoolGiB.",
    )
    host_pool_gib: int = Field(
        alias="hostPoolGiB",
        default=1,
        ge=1,
        le=65536,
        description="KV pool of one rank in host memory, GiB; a pod asks for ranksPerHost times as much.",
    )
    max_num_seqs: int = Field(
        default=16, ge=1, le=4096, description="Seats of one rank: the most requests that it runs at once."
    )
    max_waiting: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Most requests that wait in one pod; more are refused and told when to come again.",
    )
    gpu_memory_percent: int = Field(
        default=90, ge=1, le=100, description="Share of a GPU's memory that weights and KV may take, on GPUs only."
    )


class HiSparse(Base):
    """Decode keeps whole contexts in host memory, and beside the compute only what it attends to."""

    mode: HiSparseMode = Field(
        default="auto",
        description="auto: as long as the contexts of a rank fit whole in the memory of its hot buffers they lie "
        "there, and few requests run as fast as without hiSparse; always: hot buffers also then.",
    )
    device_buffer_size: int | None = Field(
        default=None,
        ge=1,
        le=32_767,
        description="Tokens in the hot buffer of one request and layer: at least the model's index_topk, twice that "
        "when absent. More are fetched less often and take more of a GPU's memory.",
    )


class DecodeSpec(RoleSpec):
    """Size of the decode role, and what only decode does."""

    hi_sparse: HiSparse | None = Field(
        default=None,
        description="Present: whole contexts stay in hostPoolGiB, and a GPU keeps index keys and hot buffers only, so "
        "that requests are limited by host memory. Absent: a GPU keeps whole contexts.",
    )

    launch_ahead: bool = Field(
        default=True,
        description="Whether a step is started before the tokens of the one before are looked at, which hides the "
        "host's work; on GPUs only.",
    )


class PrefillSpec(RoleSpec):
    """Size of the prefill role, and what only prefill does."""

    prefix_cache: bool = Field(default=True, description="Whether prompts that begin alike share KV.")


class RouterService(Base):
    """How the router is reached."""

    model_config = config(
        **rules(
            Rule(
                "!has(self.nodePort) || self.type != 'ClusterIP'",
                "router.service.nodePort needs router.service.type NodePort or LoadBalancer: a ClusterIP Service has "
                "no "
                "node port",
                ".nodePort",
            )
        )
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Type of the router's Service."
    )
    node_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port on every node, from the cluster's node port range; absent: the cluster picks one.",
    )


class KvTransfer(Base):
    """How KV crosses from prefill to decode pods."""

    backend: Literal["nixl"] = Field(default="nixl", description="What moves it; there is one.")
    net_devices: str = Field(
        default="auto",
        min_length=1,
        max_length=1024,
        pattern=NET_DEVICES_PATTERN,
        description="Network devices of the pods, by name and separated by commas, an RDMA device with its port, for "
        "example mlx5_0:1,mlx5_1:1. auto uses every active one.",
    )
    checksums: bool = Field(
        default=False,
        description="Whether every block that arrives is compared with what it is at prefill, for debugging; it costs "
        "the time to read it twice.",
    )


class KvCacheOffload(Base):
    """A store of prefixes that outlives a pod's own pool and that all pods of its roles share."""

    model_config = config(
        **rules(
            Rule(
                "'prefill' in self.roles",
                "kvCacheOffload.roles needs prefill, alone or beside decode: only prefill takes anything out of the "
                "store",
                ".roles",
            )
        )
    )

    roles: list[Annotated[Literal["prefill", "decode"], Field(description="Role that has a part of the store.")]] = (
        Field(
            min_length=1,
            max_length=2,
            json_schema_extra={"x-kubernetes-list-type": "set"},
            description="Roles whose pods keep the store and use it; others know nothing of it. Prefill saves prompts "
            "and finds what was saved; decode saves answers with their prompts, so that the next turn of a "
            "conversation finds them.",
        )
    )
    store_gib: int = Field(
        alias="storeGiB",
        ge=1,
        le=65536,
        description="Host memory that each pod of these roles gives to the store, GiB; part of its memory request.",
    )

    @field_validator("roles")
    @classmethod
    def _each_once(cls, roles: list[str]) -> list[str]:
        """As the API server has it of a set."""
        if len(set(roles)) != len(roles):
            raise ValueError("each role may be named once")
        return roles


class Router(Base):
    """The OpenAI-compatible front of the deployment."""

    replicas: int = Field(default=1, ge=0, le=100, description="Number of router pods.")
    service: RouterService = Field(default_factory=RouterService, description="The Service in front of the routers.")


class Drain(Base):
    """What a pod does before it goes."""

    window_seconds: int = Field(
        default=60,
        ge=0,
        le=86_400,
        description="Most seconds that running requests get to finish after a pod was told to go.",
    )


class CrashPolicy(Base):
    """What is done about replicas that crash."""

    model_config = config(
        **rules(
            Rule(
                # An API server checks the default, an empty object, before it fills in what the fields default to.
                "!has(self.backoffBaseSeconds) || !has(self.backoffMaxSeconds)"
                " || self.backoffBaseSeconds <= self.backoffMaxSeconds",
                "crashPolicy.backoffBaseSeconds must be at most crashPolicy.backoffMaxSeconds: the wait before a start "
                "grows from the one to the other",
                ".backoffBaseSeconds",
            )
        )
    )

    backoff_base_seconds: int = Field(
        default=30,
        ge=0,
        le=3600,
        description="Seconds that a replica waits before the start after its second crash within resetSeconds; twice "
        "as long after each further one. After the first it starts at once.",
    )
    backoff_max_seconds: int = Field(
        default=600, ge=0, le=86_400, description="Most seconds that a replica waits before a start."
    )
    max_restarts: int = Field(
        default=8,
        ge=1,
        le=32,
        description="Crashes within resetSeconds after which a replica is not started any more, until the "
        "specification is changed; Degraded says so.",
    )
    reset_seconds: int = Field(default=3600, ge=1, le=604_800, description="Seconds after which a crash is forgotten.")


class Rollout(Base):
    """How pods of an older revision are replaced."""

    max_unavailable: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Most replicas of one role that rollouts and node drains leave without service at a time; those "
        "that are missing for other reasons count. A role of one replica has none meanwhile.",
    )
    paused: bool = Field(
        default=False,
        description="Whether pods of an older revision stay. A pod that goes for another reason comes back as the "
        "newest.",
    )


class Spec(Base):
    """Desired state of a deployment."""

    model_config = config(
        **rules(
            Rule(
                # An API server checks defaults, empty objects, before it fills in what their fields default to.
                "!has(self.kvCacheOffload) || !has(self.prefill) || !has(self.prefill.prefixCache)"
                " || self.prefill.prefixCache",
                "kvCacheOffload needs prefill.prefixCache: what prompts may not share within a pod is not shared "
                "between pods either",
                ".kvCacheOffload",
            ),
            Rule(
                "!has(self.kvCacheOffload) || !has(self.prefill) || !has(self.prefill.hostsPerReplica)"
                " || self.prefill.hostsPerReplica == 1",
                "kvCacheOffload needs prefill.hostsPerReplica 1: replicas of several hosts cannot use a store so far",
                ".kvCacheOffload",
            ),
            Rule(
                "!has(self.kvCacheOffload) || !('decode' in self.kvCacheOffload.roles) || !has(self.decode)"
                " || !has(self.decode.hostsPerReplica) || self.decode.hostsPerReplica == 1",
                "kvCacheOffload for decode needs decode.hostsPerReplica 1: replicas of several hosts cannot use a "
                "store so far",
                ".kvCacheOffload",
            ),
        )
    )

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        pattern=r"^\S+$",
        description="Engine image of all pods; absent: the one that the operator was installed with.",
    )
    accelerator: Accelerator = Field(
        default="cpu",
        description="What engine pods compute on: nvidia asks for a GPU (nvidia.com/gpu) for each rank of a pod, cpu "
        "for none.",
    )
    model: Model = Field(description="The model to serve.")
    prefill: PrefillSpec = Field(default_factory=PrefillSpec, description="The role that reads prompts and fills KV.")
    decode: DecodeSpec = Field(
        default_factory=DecodeSpec,
        description="The role that writes answers; kubectl scale and autoscalers act on its replicas.",
    )
    kv_transfer: KvTransfer | None = Field(
        default=None, description="Absent: KV crosses by every active device and is not compared."
    )
    kv_cache_offload: KvCacheOffload | None = Field(
        default=None,
        description="Present: prefixes are also kept in a store that the pods of some roles share, in memory that they "
        "have for it. Absent: each pod finds only what is in its own pools.",
    )
    router: Router = Field(default_factory=Router, description="What takes requests and pairs prefill with decode.")
    drain: Drain = Field(default_factory=Drain, description="How pods are drained before they end.")
    crash_policy: CrashPolicy = Field(
        default_factory=CrashPolicy, description="What is done about replicas that crash."
    )
    rollout: Rollout = Field(default_factory=Rollout, description="How a change reaches the pods.")
    restart: str = Field(
        default="",
        max_length=253,
        description="Any text; another one replaces all pods, drained, as a rollout does. A date says when it was.",
    )
    suspend: bool = Field(
        default=False,
        description="Whether nothing shall run: all pods are drained and removed, and come back once it is false.",
    )
