"""Running programs: output kept for the error message, passed on line by line where someone watches."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2e.cluster.errors import Failed

TAIL_LINES = 15
Argv = Sequence[str | Path]
_running: set[subprocess.Popen[str]] = set()


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment with `extra` laid over it; None takes a variable out."""
    env = dict(os.environ)
    for name, value in (extra or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run(
    argv: Argv,
    *,
    env: Mapping[str, str | None] | None = None,
    stdin: str = "",
    cwd: Path | None = None,
    timeout: float | None = None,
) -> str:
    """Standard output of a program that must succeed."""
    command = [str(part) for part in argv]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            env=environment(env),
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{_shown(command)}: no end after {timeout:.0f} s") from error
    if done.returncode:
        raise Failed(f"{_shown(command)}: exit {done.returncode}\n{_tail((done.stdout + done.stderr).splitlines())}")
    return done.stdout


def ok(argv: Argv, *, env: Mapping[str, str | None] | None = None, timeout: float | None = 30) -> bool:
    """Whether a program succeeds; a missing or hanging one does not."""
    try:
        run(argv, env=env, timeout=timeout)
    except Failed:
        return False
    return True


def follow(
    argv: Argv,
    on_line: Callable[[str], object],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a program that must succeed and hand on each line that it prints as it comes."""
    command = [str(part) for part in argv]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    process = subprocess.Popen(
        command, env=environment(env), cwd=cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    _running.add(process)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            on_line(line.rstrip())
        code = process.wait()
    finally:
        _running.discard(process)
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise Failed(f"{_shown(command)}: exit {code}\n{_tail(tail)}")


def stop_running() -> None:
    """End what `follow` started in other threads: an interrupt reaches only the main one."""
    for process in list(_running):
        process.terminate()


def _shown(command: Sequence[str]) -> str:
    text = " ".join(command)
    return text if len(text) <= 200 else text[:200] + " …"


def _tail(lines: Sequence[str] | deque[str]) -> str:
    return "\n".join(f"    {line}" for line in list(lines)[-TAIL_LINES:])


def together(*jobs: Callable[[], object]) -> None:
    """Run jobs side by side, wait for all, then raise the first error: none is left running behind it."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # reraised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
