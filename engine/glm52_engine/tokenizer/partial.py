"""Markers in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` with which one of `markers` may begin; such an end must be held back."""
    markers = tuple(markers)
    longest = min(len(text), max((len(marker) - 1 for marker in markers), default=0))
    for size in range(longest, 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
