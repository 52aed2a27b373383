"""python -m e2e.cluster up | down | status | kubeconfig | logs FOLDER"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from e2e.cluster import tour
from e2e.cluster.errors import Failed, Refused
from e2e.cluster.lifecycle import attach, down, ensure
from e2e.cluster.progress import Progress
from e2e.cluster.shell import stop_running


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    progress = Progress()
    try:
        return int(options.run(options, progress) or 0)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except Failed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        stop_running()
        print("\nstopped; `up` goes on from here, `down` takes everything away", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="cluster, operator, examples/tiny.yaml and one streamed chat")
    until = up.add_mutually_exclusive_group()
    until.add_argument("--cluster-only", action="store_true", help="stop when the images are on the nodes")
    until.add_argument("--no-example", action="store_true", help="stop when the operator is installed")
    up.set_defaults(run=_up)
    commands.add_parser("down", help="remove everything that up started").set_defaults(run=_down)
    commands.add_parser("status", help="what is up").set_defaults(run=_status)
    commands.add_parser("kubeconfig", help="print the kubeconfig's path").set_defaults(run=_kubeconfig)
    logs = commands.add_parser("logs", help="copy every log of nodes and pods into a folder")
    logs.add_argument("folder", type=Path)
    logs.set_defaults(run=lambda options, _: attach().export_logs(options.folder))
    return parser


def _up(options: argparse.Namespace, progress: Progress) -> None:
    cluster = ensure(progress)
    if options.cluster_only:
        progress.say(f"export KUBECONFIG={cluster.kubeconfig}")
        return
    tour.install_operator(cluster, progress)
    if not options.no_example:
        tour.run_example(cluster, progress)


def _down(_: argparse.Namespace, progress: Progress) -> None:
    if os.environ.get("CLUSTER", "kind") == "kubeconfig":
        tour.uninstall(attach(), progress)
    else:
        down(progress)


def _status(_: argparse.Namespace, progress: Progress) -> int:
    cluster = attach()
    print(f"kubeconfig  {cluster.kubeconfig}")
    for name, image in cluster.images.items():
        print(f"{name:11s} {image}")
    print(tour.kubectl(cluster, "get", "nodes", timeout=20), end="")
    return 0


def _kubeconfig(_: argparse.Namespace, progress: Progress) -> None:
    print(attach().kubeconfig)


if __name__ == "__main__":
    sys.exit(main())
