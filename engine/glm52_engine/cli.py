"""`glm52-engine`: serve, rank-host, router, store-master, drain, make-checkpoint, local.

Each command imports only what it needs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

from glm52_engine.config import (
    API_PORT,
    CONFIG_PATH,
    INTERNAL_TOKEN_PATH,
    STORE_HEALTH_PORT,
    STORE_PORT,
    Accelerator,
    ConfigError,
    KvCacheDtype,
    Outcome,
    Preset,
)
from glm52_engine.config import EXIT_CODES as CODES
from glm52_engine.ranks.place import place_of
from glm52_engine.ranks.spans import RANK_PORT, RankHost
from glm52_engine.sizing import PROPAGATION_SECONDS

USAGE_ERROR = 2
PRESETS = "tiny: random weights, demo: trained to answer questions about this project"


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and runs one command; returns its exit code. The user never sees a traceback for what he typed."""
    args = parser().parse_args(argv)
    if args.command in ("serve", "rank-host", "router"):
        # TERM may come while Python still imports; as PID 1 it would be lost, and otherwise look like a crash.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(CODES[Outcome.DRAINED]))
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except ConfigError as error:
        print(f"glm52-engine {args.command}: {error}", file=sys.stderr)
        return CODES[Outcome.CONFIG_REFUSED]
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="glm52-engine", description="GLM-5.2 engine: prefill, decode, router.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_rank_host(commands)
    _add_router(commands)
    _add_store_master(commands)
    _add_drain(commands)
    _add_make(commands)
    _add_local(commands)
    return root


def _server_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default=CONFIG_PATH, help="the deployment's config.json (%(default)s)")
    command.add_argument("--token-file", default=INTERNAL_TOKEN_PATH, help="secret of the internal endpoints")
    command.add_argument("--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    command.add_argument("--port", type=_port, default=API_PORT, help="port to listen on (%(default)s)")
    command.add_argument("--listen-fd", type=int, help="a bound socket that was inherited, instead of host and port")
    command.add_argument(
        "--propagation-seconds",
        type=_seconds,
        default=float(PROPAGATION_SECONDS),
        help="how long a draining server still takes requests, while others learn of it (%(default)s)",
    )


def _add_serve(commands: Any) -> None:
    command = commands.add_parser("serve", help="one engine pod")
    command.add_argument("--role", required=True, choices=("prefill", "decode"))
    command.add_argument(
        "--rank-host",
        action="append",
        default=[],
        metavar="HOST:PORT",
        type=_rank_host_address,
        help="another pod of this replica, in the order of their ranks; repeatable",
    )
    command.add_argument(
        "--hosts",
        type=_count,
        default=1,
        help="pods of a replica; which of them this one is says the number in POD_NAME, and all but the first are rank "
        "hosts (%(default)s)",
    )
    command.add_argument("--domain", default="", help="with --hosts: what the pods have their DNS names under")
    _server_options(command)
    command.set_defaults(run=_serve)


def _add_rank_host(commands: Any) -> None:
    command = commands.add_parser("rank-host", help="a pod with ranks of a replica whose leader is another pod")
    command.add_argument("--role", required=True, choices=("prefill", "decode"))
    command.add_argument("--config", default=CONFIG_PATH, help="the deployment's config.json (%(default)s)")
    command.add_argument("--token-file", default=INTERNAL_TOKEN_PATH, help="secret that leader and rank hosts share")
    command.add_argument("--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    command.add_argument("--port", type=_port, default=RANK_PORT, help="port to listen on (%(default)s)")
    command.add_argument("--listen-fd", type=int, help="a bound socket that was inherited, instead of host and port")
    command.add_argument("--hosts", type=_count, required=True, help="pods of the replica, the leader included")
    command.add_argument("--host-index", type=_count, required=True, help="which of them this one is; the leader is 0")
    command.set_defaults(run=_rank_host)


def _add_store_master(commands: Any) -> None:
    command = commands.add_parser("store-master", help="what keeps the places of all KV in the store of prefixes")
    command.add_argument("--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    command.add_argument("--port", type=_port, default=STORE_PORT, help="port to listen on (%(default)s)")
    command.add_argument("--health-port", type=_port, default=STORE_HEALTH_PORT, help="for GET /health (%(default)s)")
    command.set_defaults(run=_store_master)


def _add_router(commands: Any) -> None:
    command = commands.add_parser("router", help="the OpenAI endpoint before the engine pods")
    _server_options(command)
    command.add_argument(
        "--prefill-url", action="append", type=_url, default=[], help="instead of discovery; repeatable"
    )
    command.add_argument(
        "--decode-url", action="append", type=_url, default=[], help="instead of discovery; repeatable"
    )
    command.add_argument(
        "--wait-seconds", type=_seconds, default=10.0, help="how long a request waits for a ready pod (%(default)s)"
    )
    command.set_defaults(run=_router)


def _add_drain(commands: Any) -> None:
    command = commands.add_parser("drain", help="drain the server of this pod and wait (preStop hook)")
    command.add_argument("--config", default=CONFIG_PATH)
    command.add_argument("--token-file", default=INTERNAL_TOKEN_PATH)
    command.add_argument("--port", type=_port, default=API_PORT)
    command.set_defaults(run=_drain)


def _add_make(commands: Any) -> None:
    command = commands.add_parser("make-checkpoint", help="write a small checkpoint of GLM-5.2's architecture")
    command.add_argument("--preset", required=True, choices=get_args(Preset), help=PRESETS)
    command.add_argument("--out", required=True, metavar="DIR")
    command.set_defaults(run=_make)


def _add_local(commands: Any) -> None:
    command = commands.add_parser("local", help="prefill, decode and router as processes on this machine")
    source = command.add_mutually_exclusive_group()
    source.add_argument("--preset", default="demo", choices=get_args(Preset), help=f"{PRESETS} (%(default)s)")
    source.add_argument("--model", metavar="DIR", help="a checkpoint directory")
    command.add_argument("--port", type=_port, default=API_PORT, help="port of the router (%(default)s)")
    command.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill processes (%(default)s)")
    command.add_argument("--decode", type=_count, default=1, metavar="N", help="decode processes (%(default)s)")
    command.add_argument("--max-model-len", type=_count, default=2048, help="tokens of prompt and output (%(default)s)")
    command.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KvCacheDtype),
        default="auto",
        help="how KV is stored; auto is the checkpoint's dtype (%(default)s)",
    )
    command.add_argument(
        "--hi-sparse", action="store_true", help="decode reads what it attends to from hot buffers, see docs/design.md"
    )
    command.add_argument("--name", default="glm-5.2", help="name of the model (%(default)s)")
    command.add_argument("--accelerator", default="cpu", choices=get_args(Accelerator), help="(%(default)s)")
    command.set_defaults(run=_local)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 86_400:
        raise argparse.ArgumentTypeError(f"{text}: 0 to 86400")
    return value


def _url(text: str) -> str:
    if not text.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text}: expected http://HOST:PORT")
    return text.rstrip("/")


def _rank_host_address(text: str) -> str:
    try:
        return RankHost.parse(text, ranks=1).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _store_master(args: argparse.Namespace) -> int:
    from glm52_engine.offload.master import become_master

    become_master(args.host, args.port, args.health_port)


def _serve(args: argparse.Namespace) -> int:
    from glm52_engine.serve.process import ServeOptions, serve

    rank_hosts = tuple(args.rank_host)
    if args.hosts > 1:
        place = place_of(os.environ.get("POD_NAME", ""), args.hosts, args.domain)
        if place.index:
            return _pod_of_replica(args, place.index)
        rank_hosts = place.rank_hosts
    options = ServeOptions(args.role, rank_hosts=rank_hosts, **_server(args))
    _leave(serve(options))
    return 0


def _pod_of_replica(args: argparse.Namespace, index: int) -> int:
    """A pod of the same StatefulSet as its leader, and so with the same arguments: the kubelet probes the same port."""
    from glm52_engine.ranks.process import RankHostOptions, rank_host

    options = RankHostOptions(
        role=args.role,
        config=args.config,
        token_file=args.token_file,
        host=args.host,
        port=RANK_PORT,
        hosts=args.hosts,
        index=index,
        probe_port=args.port,
    )
    _leave(rank_host(options))
    return 0


def _rank_host(args: argparse.Namespace) -> int:
    from glm52_engine.ranks.process import RankHostOptions, rank_host

    options = RankHostOptions(
        role=args.role,
        config=args.config,
        token_file=args.token_file,
        host=args.host,
        port=args.port,
        hosts=args.hosts,
        index=args.host_index,
        listen_fd=args.listen_fd,
    )
    _leave(rank_host(options))
    return 0


def _server(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "config": args.config,
        "token_file": args.token_file,
        "host": args.host,
        "port": args.port,
        "propagation": args.propagation_seconds,
        "listen_fd": args.listen_fd,
    }


def _router(args: argparse.Namespace) -> int:
    from glm52_engine.route.process import RouterOptions, route

    return route(
        RouterOptions(
            **_server(args),
            prefill_urls=args.prefill_url,
            decode_urls=args.decode_url,
            wait_seconds=args.wait_seconds,
        )
    )


def _drain(args: argparse.Namespace) -> int:
    from glm52_engine.lifecycle.ask_drain import ask_drain, drain_limit

    # Always 0: a failing preStop hook only adds noise, TERM drains as well.
    print(ask_drain(port=args.port, token_file=args.token_file, limit=drain_limit(args.config)))
    return 0


def _make(args: argparse.Namespace) -> int:
    from pathlib import Path

    from glm52_engine.checkpoint.make import make_checkpoint

    make_checkpoint(args.preset, Path(args.out))
    return 0


def _local(args: argparse.Namespace) -> int:
    from glm52_engine.local import LocalOptions, run_local

    return run_local(
        LocalOptions(
            model=args.model,
            preset=args.preset,
            port=args.port,
            prefill=args.prefill,
            decode=args.decode,
            max_model_len=args.max_model_len,
            kv_cache_dtype=args.kv_cache_dtype,
            hi_sparse=args.hi_sparse,
            accelerator=args.accelerator,
            name=args.name,
        )
    )


def _leave(code: int) -> None:
    """Ends the process now: a thread that hangs in a wedged step must not hold it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
