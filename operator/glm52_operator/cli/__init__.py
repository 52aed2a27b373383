"""The command line of the operator."""

from glm52_operator.cli.main import main

__all__ = ["main"]
