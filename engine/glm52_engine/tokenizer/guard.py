"""What clients write stays text: none of their strings becomes a special token of the prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode's noncharacters for use within a program; one that the client did not send is taken."""


class Guarded(NamedTuple):
    """The conversation with `mark` inside every marker that a client wrote; an empty mark: nothing had to be done."""

    messages: list[Any]
    tools: list[Any] | None
    mark: str


class Guard:
    """`markers`: the texts of all tokens that a tokenizer finds in text. `markup`: those of them that are part of an
    answer's text (reasoning, calls); a conversation brings them back in the assistant's own content, where they are
    what they were."""

    def __init__(self, markers: Collection[str], markup: Collection[str]) -> None:
        self._all = tuple(markers)
        self._foreign = tuple(set(markers) - set(markup))

    def shield(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Guarded:
        """Raises ValueError when no mark is left."""
        conversation = list(messages)
        # Substrings, not a pattern: a prompt may have 30 MB, and a pattern would hold Python's lock for all of them.
        if not any(marker in text for text in _strings([conversation, tools]) for marker in self._all):
            return Guarded(conversation, None if tools is None else list(tools), "")
        used = {mark for text in _strings([conversation, tools]) for mark in _MARKS if mark in text}
        mark = next((mark for mark in _MARKS if mark not in used), "")
        if not mark:
            raise ValueError("special tokens in the text beside every noncharacter from U+FDD0 to U+FDEF")
        return Guarded(
            [self._message(message, mark) for message in conversation],
            None if tools is None else [_marked(tool, self._all, mark) for tool in tools],
            mark,
        )

    def _message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        own = message.get("role") == "assistant"
        return {
            name: _marked(value, self._foreign if own and name == "content" else self._all, mark)
            for name, value in message.items()
        }


def _marked(value: Any, markers: Iterable[str], mark: str) -> Any:
    """Any JSON value, names of fields included: a template may render those too."""
    if isinstance(value, str):
        for marker in markers:
            # More than once, since a marker may overlap with itself.
            while marker in value:
                value = value.replace(marker, marker[0] + mark + marker[1:])
        return value
    if isinstance(value, list):
        return [_marked(item, markers, mark) for item in value]
    if isinstance(value, dict):
        return {_marked(name, markers, mark): _marked(item, markers, mark) for name, item in value.items()}
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(name)
            yield from _strings(item)
