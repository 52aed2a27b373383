"""GLM52Deployment as pydantic models: source of the CRD's schema, and what the operator reads objects through.

A rule that a schema can say stands in the field; a rule over several fields is a CEL rule in `rules(...)`, checked by
the API server at apply.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator
from pydantic.alias_generators import to_camel

from glm52_engine.config import MODEL_MOUNT, NET_DEVICES_PATTERN, Accelerator, HiSparseMode, KvCacheDtype, Preset
from glm52_operator import names


class Rule(dict[str, str]):
    """One x-kubernetes-validations entry."""

    def __init__(self, rule: str, message: str, field_path: str | None = None) -> None:
        super().__init__(rule=rule, message=message)
        if field_path is not None:
            self["fieldPath"] = field_path


def rules(*entries: Rule) -> dict[str, Any]:
    return {"x-kubernetes-validations": [dict(entry) for entry in entries]}


def _config(**extra: Any) -> ConfigDict:
    return ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, json_schema_extra=extra or None
    )


class _Model(BaseModel):
    model_config = _config()


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


class Model(_Model):
    """The checkpoint to serve and what it may be asked."""

    model_config = _config(
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


class RoleSpec(_Model):
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


class HiSparse(_Model):
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


class RouterService(_Model):
    """How the router is reached."""

    model_config = _config(
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


class KvTransfer(_Model):
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


class KvCacheOffload(_Model):
    """A store of prefixes that outlives a pod's own pool and that all pods of its roles share."""

    model_config = _config(
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


class Router(_Model):
    """The OpenAI-compatible front of the deployment."""

    replicas: int = Field(default=1, ge=0, le=100, description="Number of router pods.")
    service: RouterService = Field(default_factory=RouterService, description="The Service in front of the routers.")


class Drain(_Model):
    """What a pod does before it goes."""

    window_seconds: int = Field(
        default=60,
        ge=0,
        le=86_400,
        description="Most seconds that running requests get to finish after a pod was told to go.",
    )


class CrashPolicy(_Model):
    """What is done about replicas that crash."""

    model_config = _config(
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


class Rollout(_Model):
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


class Spec(_Model):
    """Desired state of a deployment."""

    model_config = _config(
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


class Condition(_Model):
    """One aspect of the state, in the usual form."""

    type: str = Field(max_length=316, description="Name of the aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the aspect holds.")
    reason: str = Field(
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, in one CamelCase word for programs.",
    )
    message: str = Field(max_length=32768, description="Why, and what to do about it, for people.")
    last_transition_time: str = Field(
        json_schema_extra={"format": "date-time"}, description="When status last changed."
    )
    observed_generation: int = Field(
        ge=0, json_schema_extra={"format": "int64"}, description="metadata.generation that this condition speaks about."
    )


class MemoryStatus(_Model):
    """Host memory of one pod of a role: request and limit, and the sum behind it."""

    per_host: str = Field(description="Memory request and limit of one pod.")
    host_pools: str = Field(description="ranksPerHost times hostPoolGiB.")
    store: str | None = Field(default=None, description="storeGiB, where the role has a store.")
    weights: str = Field(description="Weights of the model.")
    shared_memory: str = Field(description="/dev/shm of the pod.")
    overhead: str = Field(description="Processes and step buffers.")
    explanation: str = Field(description="The sum written out.")


class RoleStatus(_Model):
    """Observed state of one role."""

    replicas: int = Field(json_schema_extra={"format": "int32"}, description="Replicas that exist.")
    ready_replicas: int = Field(json_schema_extra={"format": "int32"}, description="Replicas that can serve.")
    updated_replicas: int = Field(
        json_schema_extra={"format": "int32"}, description="Replicas that run the newest revision."
    )
    selector: str = Field(description="Label selector of one pod of each replica, its leader, as autoscalers read it.")
    ready: str = Field(description="Ready and desired replicas, for example 1/2.")
    memory: MemoryStatus | None = Field(default=None, description="Host memory of one pod.")


_TIME: dict[str, JsonValue] = {"format": "date-time"}
_INT32: dict[str, JsonValue] = {"format": "int32"}

MOST_COUNTED = 2048
"""Ends of one replica's hosts that are kept: 32 crashes of 64 hosts."""

CrashId = Annotated[str, Field(max_length=64, description="Id of a crash.")]


class CrashStatus(_Model):
    """Evidence of one end that nobody had asked for."""

    id: str = Field(max_length=64, description="The same whenever this end is looked at.")
    pod: str = Field(description="Name of the pod.")
    node: str | None = Field(default=None, description="Where it ran.")
    rank: int | None = Field(default=None, json_schema_extra=_INT32, description="The rank that failed, if one did.")
    exit_code: int | None = Field(default=None, json_schema_extra=_INT32, description="Absent where nobody saw it.")
    reason: str = Field(
        description="Crashed, Wedged, OOMKilled, Killed (by a signal), EndedUnasked, NodeLost, HostLost (another host "
        "of the replica, of which nothing was heard), or the kubelet's word."
    )
    marker: str | None = Field(default=None, description="CRASH_<host>, where the engine could still write it.")
    time: str = Field(json_schema_extra=_TIME, description="When it ended.")
    revision: str | None = Field(default=None, description="Revision of the pod.")
    message: str = Field(max_length=4096, description="Why, and the last log lines.")


class CountedCrash(_Model):
    """One crash that counts."""

    id: str = Field(max_length=64, description="Id of the entry in crashes.")
    pod: str = Field(description="Name of the pod.")
    time: str = Field(json_schema_extra=_TIME, description="When.")


class RestartStatus(_Model):
    """A replica that crashed within crashPolicy.resetSeconds: what its back-off is computed from."""

    replica: str = Field(description="Name of its leader's pod; of the routers, of their Deployment.")
    count: int = Field(json_schema_extra=_INT32, description="Crashes that count.")
    held_until: str | None = Field(default=None, json_schema_extra=_TIME, description="When it may start again.")
    latched: bool = Field(description="Whether it is not started any more.")
    basis: str = Field(description="Hash of the specification that they count against.")
    crashes: list[CountedCrash] = Field(max_length=MOST_COUNTED, description="The crashes, oldest first.")
    forgiven: list[CrashId] | None = Field(
        default=None, max_length=MOST_COUNTED, description="Ids that an edit has taken off the account."
    )


class DrainStatus(_Model):
    """A pod that leaves, or one that has left."""

    pod: str = Field(description="Name of the pod.")
    uid: str = Field(description="Its uid: names come again.")
    node: str | None = Field(default=None, description="Where it runs.")
    phase: Literal["Draining", "Terminating", "StuckTerminating", "Ended"] = Field(
        description="Draining: requests finish. Terminating: it only has to end. StuckTerminating: it outlives its "
        "grace period. Ended: it is gone."
    )
    in_flight: int | None = Field(
        default=None, json_schema_extra=_INT32, description="Requests and held prompts that it still serves."
    )
    started_at: str = Field(json_schema_extra=_TIME, description="When it was told to go.")
    deadline: str = Field(json_schema_extra=_TIME, description="When its grace period is over.")
    outcome: Literal["Drained", "DrainTimedOut", "Killed", "Crashed", "Unknown"] | None = Field(
        default=None, description="How it ended; Unknown: it was gone before anybody saw."
    )
    ended_at: str | None = Field(default=None, json_schema_extra=_TIME, description="When it was gone.")
    cut_off: int | None = Field(default=None, json_schema_extra=_INT32, description="Requests that did not finish.")


class Status(_Model):
    """Observed state of a deployment, written by the operator only."""

    observed_generation: int | None = Field(
        default=None, json_schema_extra={"format": "int64"}, description="metadata.generation that this speaks about."
    )
    url: str | None = Field(default=None, description="Where the OpenAI-compatible API is reached inside the cluster.")
    up_to_date: str | None = Field(
        default=None, description="Replicas of both roles and routers on the newest revision, of those desired: 3/3."
    )
    host_ram: str | None = Field(default=None, description="Host memory of one prefill and of one decode pod.")
    conditions: list[Condition] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        description=(
            "ConfigValid, PrefillReady, DecodeReady, RouterReady, Schedulable, Progressing, Draining, and Ready, which "
            "sums up whether it serves; the alarms Degraded and Stalled only while they are True."
        ),
    )
    prefill: RoleStatus | None = Field(default=None, description="Observed state of the prefill role.")
    decode: RoleStatus | None = Field(default=None, description="Observed state of the decode role.")
    drains: list[DrainStatus] | None = Field(
        default=None, max_length=110, description="Pods that leave, and then the last ones that have left."
    )
    crashes: list[CrashStatus] | None = Field(
        default=None, max_length=10, description="The last crashes, newest first; they outlive their pods."
    )
    restarts: list[RestartStatus] | None = Field(
        default=None, max_length=2100, description="Replicas that crashed lately."
    )


class GLM52Deployment(BaseModel):
    """GLM-5.2 served with prefill and decode in separate pods behind one OpenAI-compatible router."""

    model_config = _config(
        **rules(
            Rule(
                f"self.metadata.name.size() <= {names.MAX_NAME}",
                f"metadata.name must be at most {names.MAX_NAME} characters: the names and labels of the "
                "StatefulSets, Services "
                "and pods are made from it and may not pass 63",
            ),
            Rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must be a DNS label that starts with a letter (lower case letters, digits and '-', no "
                "dots): "
                "Services are named after it",
            ),
        )
    )

    spec: Spec = Field(description="Desired state.")
    status: Status | None = Field(default=None, description="Observed state; written by the operator.")
