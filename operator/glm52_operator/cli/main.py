"""`glm52-operator run` and `glm52-operator crd`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="glm52-operator", description="Kubernetes operator for GLM-5.2.")
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run the operator until TERM")
    run.add_argument(
        "--engine-image",
        default=os.environ.get("GLM52_ENGINE_IMAGE") or None,
        help="image of deployments that name none (GLM52_ENGINE_IMAGE)",
    )
    run.add_argument(
        "--namespace",
        action="append",
        default=[name for name in os.environ.get("GLM52_NAMESPACES", "").split(",") if name],
        help="serve this namespace only; may be repeated (GLM52_NAMESPACES, comma-separated); default: all",
    )
    run.add_argument(
        "--lease",
        type=_namespaced,
        metavar="NAMESPACE/NAME",
        help="act only while holding this Lease, so that of several processes one does; default: act alone",
    )
    run.add_argument(
        "--identity",
        default=os.environ.get("GLM52_IDENTITY") or f"{socket.gethostname()}_{uuid.uuid4()}",
        help="who holds the lease; the same after a restart of a pod, another in each pod (GLM52_IDENTITY)",
    )
    run.add_argument("--health-host", default="0.0.0.0", help="address of /healthz, /readyz and /metrics (all)")
    run.add_argument("--health-port", type=int, default=8080, help="port of /healthz, /readyz and /metrics (8080)")
    run.add_argument("-v", "--verbose", action="store_true", help="log more")

    crd = commands.add_parser("crd", help="write the CustomResourceDefinition, or check that the files are current")
    crd.add_argument("--check", action="store_true", help="change nothing; fail if a file is not what would be written")
    crd.add_argument("--root", type=Path, default=Path(), help="root of the repository (.)")
    return top


def _namespaced(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAMESPACE/NAME")
    return namespace, name


def main(argv: Sequence[str] | None = None) -> int:
    # The commands load their modules themselves: writing the CRD needs neither kopf nor a client.
    arguments = parser().parse_args(argv)
    if arguments.command == "crd":
        from glm52_operator.cli import crd

        return crd.run(arguments.root, check=arguments.check)
    from glm52_operator.cli import run

    return run.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
