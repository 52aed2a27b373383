"""What ends a command early."""

from __future__ import annotations

REFUSED = 1
"""Exit code of input that is refused, and of a deployment that is not Ready."""

UNREACHABLE = 2
"""Exit code of a cluster that does not answer: nothing can be said about the deployment."""


class CtlError(Exception):
    """A message for the person at the terminal: what, where, and what to do."""

    def __init__(self, message: str, code: int = REFUSED) -> None:
        super().__init__(message)
        self.code = code
