"""Reasoning apart from the answer, by what the prompt left open and never by what the text looks like."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from glm52_engine.tokenizer.marks import END_THINK, THINK
from glm52_engine.tokenizer.partial import possible_start
from glm52_engine.tokenizer.tokenizer import Tokenizer

ASSISTANT = "<|assistant|>"


class Thinking(Enum):
    """What the generation prompt did about `<think>`."""

    OPEN = "open"
    """It opened it: the answer begins with reasoning."""
    MAY_OPEN = "may open"
    """It left that to the model, which reasons if `<think>` is the first thing it writes."""
    CLOSED = "closed"
    """It closed it: whatever the model writes is the answer."""


def thinking_after(prompt: Sequence[int], tokenizer: Tokenizer) -> Thinking:
    """Read from the end of a prompt's token ids to its last turn; what users wrote lies before that."""
    found = {
        tokenizer.id_of(THINK): Thinking.OPEN,
        tokenizer.id_of(END_THINK): Thinking.CLOSED,
        tokenizer.id_of(ASSISTANT): Thinking.MAY_OPEN,
    }
    return next((found[token] for token in reversed(prompt) if token in found), Thinking.MAY_OPEN)


class ReasoningSplitter:
    """Text of one answer, in pieces → (reasoning, answer) of each. The pieces' borders never change the sums."""

    def __init__(self, thinking: Thinking) -> None:
        self._state = thinking
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""
        return self._state is Thinking.OPEN

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        if self._state is Thinking.MAY_OPEN:
            start = self._held.lstrip()
            if THINK.startswith(start) and start != THINK:
                return "", ""
            opened = start.startswith(THINK)
            self._state = Thinking.OPEN if opened else Thinking.CLOSED
            self._held = start[len(THINK) :] if opened else self._held
        if self._state is Thinking.CLOSED:
            return "", self._take(len(self._held))
        at = self._held.find(END_THINK)
        if at < 0:
            return self._take(len(self._held) - possible_start(self._held, (END_THINK,))), ""
        reasoning = self._take(at)
        self._state = Thinking.CLOSED
        return reasoning, self._take(len(self._held))[len(END_THINK) :]

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        rest = self._take(len(self._held))
        return (rest, "") if self._state is Thinking.OPEN else ("", rest)

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text
