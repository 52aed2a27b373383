"""Markers in text that comes in pieces."""

from __future__ import annotations


def possible_start(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of `markers` may begin; such an end must be held back.

    Every marker begins with `<` and has no other one.
    """
    at = text.rfind("<", -max(map(len, markers)))
    return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in markers) else 0
