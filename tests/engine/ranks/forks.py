"""Processes that begin with torch and the engine imported, by a fork: half of the work of a small replica's start.

From then on they are what `python -m` makes of the same arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any

from glm52_engine.local import die_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["glm52_engine.ranks.process", "glm52_engine.ranks.replica"])


class Fork:
    """`python ARGS` (which begin with -m MODULE) with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, args: Sequence[str], *, stderr: int, env: Mapping[str, str], cwd: Path, listen: int | None
    ) -> None:
        """`listen`: a socket's descriptor, which the arguments name after --listen-fd."""
        kept = dict(os.environ)
        os.environ.clear()
        os.environ.update(env)
        try:
            forkserver.ensure_running()  # where there is none yet, it finds the modules by this environment
        finally:
            os.environ.clear()
            os.environ.update(kept)
        (stdin, ours), (theirs, stdout) = os.pipe(), os.pipe()
        given = [_Descriptor(fd) for fd in (stdin, stdout, stderr, *(() if listen is None else (listen,)))]
        self._process = _CONTEXT.Process(target=_run, args=(list(args), dict(env), str(cwd), given), daemon=True)
        self._process.start()
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(ours, "w"), os.fdopen(theirs)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Descriptor:
    """A file descriptor that goes to the process with its arguments."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._fd),)


def _received(sent: Any) -> int:
    fd: int = sent.detach()
    return fd


def _run(args: list[str], env: Mapping[str, str], cwd: str, given: list[int]) -> None:
    for number, fd in enumerate(given[:3]):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    prepare = die_with_parent()
    if prepare is not None:
        prepare()
    if given[3:]:
        args[args.index("--listen-fd") + 1] = str(given[3])
    sys.argv = args[1:]
    code: Any = 0
    try:
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)
