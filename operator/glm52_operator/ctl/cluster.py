"""The only part of the tool that talks to a cluster: with the rights of whoever calls it, and without a write."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from kubernetes.aio import client as k8s
from kubernetes.aio import config as k8s_config
from pydantic import ValidationError

from glm52_operator import names
from glm52_operator.api.spec import Spec
from glm52_operator.ctl import check, diff
from glm52_operator.ctl.diff import Change
from glm52_operator.ctl.errors import UNREACHABLE, CtlError
from glm52_operator.ctl.manifest import Manifest
from glm52_operator.ctl.snapshot import COMPONENTS, Snapshot, snapshot
from glm52_operator.desired.children import build
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.changes import stamp
from glm52_operator.plan.ownership import Ownership, ownership
from glm52_operator.reconcile.client import MANAGED_SELECTOR, Api, ApiError
from glm52_operator.reconcile.kinds import BY_KIND, CHILDREN, DEPLOYMENT_RESOURCE, POD

_OPERATORS = "the operator's image"


@dataclass(frozen=True, slots=True)
class Cluster:
    api: Api
    namespace: str
    """Namespace of the context."""


@asynccontextmanager
async def connected(kubeconfig: str | None, context: str | None) -> AsyncIterator[Cluster]:
    """By --kubeconfig, $KUBECONFIG or ~/.kube/config; inside a pod without any, by its service account."""
    # The client warns on its own of what the message below says.
    logging.getLogger().addHandler(logging.NullHandler())
    configuration = k8s.Configuration()
    namespace = await _configure(configuration, kubeconfig, context)
    api = Api(k8s.ApiClient(configuration))
    try:
        yield Cluster(api, namespace)
    except ApiError as error:
        raise CtlError(_explain(error), UNREACHABLE) from error
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        # A proxy's login page, or some other server behind the address: its answers have not the API's form.
        text = f"the server at {configuration.host} does not answer as the Kubernetes API does ({error!r})"
        raise CtlError(f"{text}. Check the context", UNREACHABLE) from error
    finally:
        await api.close()


async def _configure(configuration: k8s.Configuration, kubeconfig: str | None, context: str | None) -> str:
    try:
        contexts, active = k8s_config.list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
        chosen = active if context is None else next((c for c in contexts if c["name"] == context), None)
        if chosen is None:
            there = ", ".join(sorted(str(c["name"]) for c in contexts)) or "none"
            raise CtlError(f"--context {context}: is not in the kubeconfig; there are: {there}", UNREACHABLE)
        await k8s_config.load_kube_config(  # type: ignore[no-untyped-call]
            kubeconfig, context=context, client_configuration=configuration, persist_config=False
        )
        return str(chosen["context"].get("namespace") or "default")
    except CtlError:
        raise
    except Exception as error:
        # The client checks little of a kubeconfig: what is wrong in it surfaces as whatever the access raised.
        if kubeconfig is None and context is None and _inside(configuration):
            return "default"
        text = " ".join(str(error).split()) or type(error).__name__
        remedy = "Set $KUBECONFIG or --kubeconfig to a file that kubectl can use"
        raise CtlError(f"no cluster: the kubeconfig cannot be used ({text}). {remedy}", UNREACHABLE) from error


def _inside(configuration: k8s.Configuration) -> bool:
    try:
        k8s_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except k8s_config.ConfigException:
        return False
    return True


def _explain(error: ApiError) -> str:
    if error.code == 401:
        return f"{error}. The context's credentials are not valid (any more): log in again"
    if error.code == 403:
        return f"{error}. You need the verb {error.verb!r} on {error.kind.resource!r}"
    if error.code == 0:
        return f"the cluster does not answer ({error}). Check the context, and that the API server can be reached"
    return str(error)


async def look(cluster: Cluster, namespace: str, name: str) -> Snapshot:
    """Everything about one deployment; raises CtlError where there is none."""
    api = cluster.api
    resource = await api.get(DEPLOYMENT_RESOURCE, namespace, name)
    if resource is None:
        raise await _absent(api, namespace, name)
    workloads = await asyncio.gather(*(_workload(api, namespace, name, component) for component in COMPONENTS))
    pods, _ = await api.list(POD, namespace, labels=f"{MANAGED_SELECTOR},{names.NAME}={name}")
    now = datetime.datetime.now(datetime.UTC)
    return snapshot(resource, dict(zip(COMPONENTS, workloads, strict=True)), pods, now=now)


async def _workload(api: Api, namespace: str, name: str, component: names.Component) -> Object | None:
    kind = BY_KIND["Deployment" if component == names.ROUTER else "StatefulSet"]
    return await api.get(kind, namespace, names.role(name, component))


async def _absent(api: Api, namespace: str, name: str) -> CtlError:
    what = f"there is no {names.KIND} {name} in namespace {namespace}"
    try:
        found, _ = await api.list(DEPLOYMENT_RESOURCE, namespace)
    except ApiError as error:
        if error.code == 404:
            return CtlError(
                f"the cluster does not know {names.CRD_NAME}: install the operator's chart, or apply its CRD"
            )
        raise
    others = ", ".join(sorted(str(obj["metadata"]["name"]) for obj in found))
    return CtlError(f"{what}; there are: {others}" if others else f"{what}, nor any other; choose one with -n")


async def changes(cluster: Cluster, manifest: Manifest, namespace: str, image: str | None) -> list[Change]:
    """What an apply of the manifest would change, by dry runs of what the operator would then apply."""
    api, name = cluster.api, manifest.name
    live = await api.get(DEPLOYMENT_RESOURCE, namespace, name)
    if live is None:
        target = check.target(manifest, namespace, image or _OPERATORS)
        return [Change(names.KIND, name, (), new=True), *(_new(child) for child in build(target))]
    resource = {**live, "spec": diff.three_way(live, manifest.resource)}
    wrong = check.problems(manifest.resource | {"spec": resource["spec"]})
    if wrong:
        merged = "together with what the cluster has, the object would be refused"
        raise CtlError("\n".join(f"{manifest.title}: {merged}: {text}" for text in wrong))
    observed = await _children(api, namespace, name)
    target = check.target(replace(manifest, resource=resource), namespace, image or _image(observed) or _OPERATORS)
    found = [_own_change(live, resource)]
    for child in map(stamp, build(target)):
        found.append(await _change(api, target, child, observed))
    wanted = {(child["kind"], child["metadata"]["name"]) for child in build(target)}
    found += [
        Change(kind, child, (), gone=True)
        for (kind, child), obj in observed.items()
        if (kind, child) not in wanted and _controlled(obj, target)
    ]
    return [change for change in found if change is not None]


def _controlled(obj: Object, target: Target) -> bool:
    """What the operator deletes once it is no longer wanted; an orphan is left alone."""
    return any(ref.get("controller") and ref["uid"] == target.uid for ref in obj["metadata"].get("ownerReferences", []))


async def _children(api: Api, namespace: str, name: str) -> dict[tuple[str, str], Object]:
    labels = f"{MANAGED_SELECTOR},{names.NAME}={name}"
    lists = await asyncio.gather(*(api.list(kind, namespace, labels=labels) for kind in CHILDREN))
    return {(obj["kind"], obj["metadata"]["name"]): obj for found, _ in lists for obj in found}


def _image(observed: dict[tuple[str, str], Object]) -> str | None:
    """Without spec.image and --engine-image: what runs is what the operator was installed with."""
    for (kind, _), obj in observed.items():
        if kind == "StatefulSet":
            return str(obj["spec"]["template"]["spec"]["containers"][0]["image"])
    return None


def _new(child: Object) -> Change:
    return Change(child["kind"], child["metadata"]["name"], (), new=True)


def _own_change(live: Object, resource: Object) -> Change | None:
    """The deployment's own fields, defaults filled in on both sides."""
    before, after = ({**live, "spec": _filled(obj["spec"])} for obj in (live, resource))
    return diff.compare(before, after)


def _filled(spec: Any) -> Any:
    try:
        return Spec.model_validate(spec).model_dump(by_alias=True, exclude_none=True, mode="json")
    except ValidationError:
        # The cluster's CRD may be of another version; its fields are compared as they stand.
        return spec


async def _change(api: Api, target: Target, child: Object, observed: dict[tuple[str, str], Object]) -> Change | None:
    kind, name = BY_KIND[child["kind"]], child["metadata"]["name"]
    before = observed.get((kind.kind, name)) or await api.get(kind, target.namespace, name)
    if before is None:
        return _new(child)
    match ownership(before, target):
        case Ownership.OURS:
            return diff.compare(before, await api.apply(kind, child, dry_run=True))
        case Ownership.LEAVING:
            return Change(kind.kind, name, [("", "of a deployment that was deleted", "made again once it is gone")])
        case Ownership.FOREIGN:
            return Change(kind.kind, name, [("", "belongs to somebody else", "left alone: the deployment cannot work")])


async def report_changes(
    cluster: Cluster, manifests: Sequence[tuple[Manifest, str]], image: str | None
) -> list[tuple[str, list[Change]]]:
    """Heading and changes of each manifest, in order."""
    return [
        (f"{names.KIND} {manifest.name} in namespace {namespace}", await changes(cluster, manifest, namespace, image))
        for manifest, namespace in manifests
    ]
