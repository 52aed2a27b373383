"""Another pod's transfer agent, in a process that a test may freeze and kill: see `peer`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from glm52_engine.transfer.peers import AgentCard

BLOCKS = 64
ROOT = Path(__file__).parents[3]


class Process:
    """One that is talked to by lines."""

    def __init__(self, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.engine.transfer.{module}", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'engine'}:{ROOT}"},
        )

    def line(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line[len(start) :]
        raise AssertionError(f"the peer ended without {start}")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def freeze(self) -> None:
        """Returns when it has stopped: the signal alone is only a wish."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Remote(Process):
    def __init__(self, name: str, blocks: int = BLOCKS, block_bytes: int = 0, lanes: int = 1) -> None:
        super().__init__("peer", name, blocks, block_bytes, lanes)
        self.card = self.line("CARD ").strip()
        self.peer = AgentCard.model_validate_json(self.card).peer()
