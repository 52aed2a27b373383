"""What the operator has found: the schema of `status`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from glm52_operator.api.base import Base


class Condition(Base):
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


class MemoryStatus(Base):
    """Host memory of one pod of a role: request and limit, and the sum behind it."""

    per_host: str = Field(description="Memory request and limit of one pod.")
    host_pools: str = Field(description="ranksPerHost times hostPoolGiB.")
    store: str | None = Field(default=None, description="storeGiB, where the role has a store.")
    weights: str = Field(description="Weights of the model.")
    shared_memory: str = Field(description="/dev/shm of the pod.")
    overhead: str = Field(description="Processes and step buffers.")
    explanation: str = Field(description="The sum written out.")


class RoleStatus(Base):
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


class CrashStatus(Base):
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


class CountedCrash(Base):
    """One crash that counts."""

    id: str = Field(max_length=64, description="Id of the entry in crashes.")
    pod: str = Field(description="Name of the pod.")
    time: str = Field(json_schema_extra=_TIME, description="When.")


class RestartStatus(Base):
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


class DrainStatus(Base):
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


class Status(Base):
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
