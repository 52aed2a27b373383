"""From the text of one chat choice to what stands in its message, and in the deltas of its stream."""

from __future__ import annotations

from typing import Any


class ChatText:
    """The one place where a chat choice's text becomes fields; whole answers go the same way as streamed ones."""

    def __init__(self) -> None:
        self._content: list[str] = []

    def push(self, text: str) -> dict[str, Any]:
        """The fields of a delta that this text adds, none if it adds nothing yet."""
        self._content.append(text)
        return {"content": text} if text else {}

    def end(self, finish: str) -> tuple[dict[str, Any], str]:
        """Fields that were held back until the end, and the finish reason that the client sees."""
        return {}, finish

    def message(self) -> dict[str, Any]:
        """All fields together, after the end."""
        return {"content": "".join(self._content), "refusal": None}
