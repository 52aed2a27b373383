"""`glm52ctl plan`, `render`, `status` and `diagnose`."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from glm52_operator.ctl import check, diff, manifest, plan, render
from glm52_operator.ctl.diagnose import is_ready, report
from glm52_operator.ctl.errors import REFUSED, CtlError
from glm52_operator.ctl.manifest import Documents, Manifest
from glm52_operator.ctl.snapshot import Snapshot
from glm52_operator.ctl.text import clean
from glm52_operator.ctl.tree import tree

UNKNOWN_IMAGE = "(the one that the operator was installed with)"


def parser() -> argparse.ArgumentParser:
    plugin = Path(sys.argv[0]).name.startswith("kubectl-")
    top = argparse.ArgumentParser(
        prog="kubectl glm52" if plugin else "glm52ctl", description="Plan, inspect and diagnose GLM52Deployments."
    )
    commands = top.add_subparsers(dest="command", required=True)

    planning = commands.add_parser("plan", help="what the operator would make of a file: objects, memory, times")
    rendered = commands.add_parser("render", help="the children of a file's deployments as YAML")
    for command in (planning, rendered):
        command.add_argument("-f", "--filename", required=True, help="file of YAML documents; - for stdin")
        command.add_argument("-n", "--namespace", help="namespace of documents that name none")
        command.add_argument(
            "--engine-image",
            default=os.environ.get("GLM52_ENGINE_IMAGE") or None,
            help="image that the operator was installed with (GLM52_ENGINE_IMAGE)",
        )
    planning.add_argument("--diff", action="store_true", help="what would change in the cluster, by dry runs")

    status = commands.add_parser("status", help="a deployment, its roles and pods, and the next step")
    diagnose = commands.add_parser("diagnose", help="why a deployment is not Ready, in order of cause; 0 when it is")
    for command in (status, diagnose):
        command.add_argument("name", help="name of the deployment")
        command.add_argument("-n", "--namespace", help="its namespace; default: that of the context")
    for command in (planning, status, diagnose):
        command.add_argument("--kubeconfig", help="file to use instead of $KUBECONFIG")
        command.add_argument("--context", help="context to use instead of the current one")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, and Ready; 1 refused, or not Ready; 2 wrong usage, or no cluster to ask."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal of another encoding gets marks for what it cannot show, and no traceback.
            stream.reconfigure(errors="replace")
    arguments = parser().parse_args(argv)
    commands = {"plan": _plan, "render": _render, "status": _status, "diagnose": _diagnose}
    try:
        if arguments.namespace is not None and not manifest.is_namespace(arguments.namespace):
            raise CtlError(f"--namespace {arguments.namespace}: is no name of a namespace")
        text, code = commands[arguments.command](arguments)
        print(clean(text))
        sys.stdout.flush()
    except CtlError as error:
        print("\n".join(f"glm52ctl: {clean(line)}" for line in str(error).splitlines()), file=sys.stderr)
        return error.code
    except BrokenPipeError:
        # `glm52ctl … | head`: the interpreter's own flush at the end must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except KeyboardInterrupt:
        return 130
    return code


def _plan(arguments: argparse.Namespace) -> tuple[str, int]:
    documents = _read(arguments)
    if arguments.diff:
        return asyncio.run(_diff(arguments, documents)), 0
    parts = [
        plan.describe(
            check.target(each, _namespace(each, arguments, "default"), arguments.engine_image or UNKNOWN_IMAGE),
            each.where,
        )
        for each in documents.deployments
    ]
    if documents.others:
        parts.append(f"Left aside: {', '.join(documents.others)}.")
    return "\n\n".join(parts), 0


async def _diff(arguments: argparse.Namespace, documents: Documents) -> str:
    # The client of the API is loaded only by commands that need a cluster.
    from glm52_operator.ctl import cluster

    async with cluster.connected(arguments.kubeconfig, arguments.context) as found:
        chosen = [(each, _namespace(each, arguments, found.namespace)) for each in documents.deployments]
        reports = await cluster.report_changes(found, chosen, arguments.engine_image)
    return "\n\n".join(f"{heading}\n{diff.report(changes)}" for heading, changes in reports)


def _render(arguments: argparse.Namespace) -> tuple[str, int]:
    targets = []
    for each in _read(arguments).deployments:
        if each.resource["spec"].get("image") is None and arguments.engine_image is None:
            raise CtlError(
                f"{each.title}: spec.image: is not set, and which image the operator was "
                "installed with is not known here. Set it, or give --engine-image"
            )
        targets.append(check.target(each, _namespace(each, arguments, "default"), arguments.engine_image))
    return render.render(targets).rstrip("\n"), 0


def _status(arguments: argparse.Namespace) -> tuple[str, int]:
    return tree(_look(arguments)), 0


def _diagnose(arguments: argparse.Namespace) -> tuple[str, int]:
    seen = _look(arguments)
    return report(seen), 0 if is_ready(seen) else 1


def _look(arguments: argparse.Namespace) -> Snapshot:
    from glm52_operator.ctl import cluster

    async def look() -> Snapshot:
        async with cluster.connected(arguments.kubeconfig, arguments.context) as found:
            return await cluster.look(found, arguments.namespace or found.namespace, arguments.name)

    return asyncio.run(look())


def _read(arguments: argparse.Namespace) -> Documents:
    """The file's documents; raises CtlError with everything that an apply would be refused for."""
    documents = manifest.parse(manifest.read(arguments.filename), arguments.filename)
    wrong = [f"{each.title}: {problem}" for each in documents.deployments for problem in check.problems(each.resource)]
    if wrong:
        raise CtlError("\n".join(wrong))
    return documents


def _namespace(each: Manifest, arguments: argparse.Namespace, default: str) -> str:
    given = arguments.namespace
    if given is not None and each.namespace not in (None, given):
        raise CtlError(
            f"{each.title}: metadata.namespace is {each.namespace}, --namespace says {given}. Leave one of them out"
        )
    return each.namespace or given or default


if __name__ == "__main__":
    sys.exit(main())
