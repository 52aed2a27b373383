"""What is wrong with a grammar."""

from __future__ import annotations


class GrammarError(ValueError):
    """What was asked for is no usable grammar; the text goes to the client."""
