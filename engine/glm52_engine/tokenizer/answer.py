"""One answer's text, in pieces → reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm52_engine.tokenizer.reasoning import ReasoningSplitter, Thinking
from glm52_engine.tokenizer.tool_calls import CallDelta, Parsed, ToolCallParser


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """`tools` None: calls are not looked for, and their marks are content. Reasoning never holds a call."""

    def __init__(self, thinking: Thinking, tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._splitter = ReasoningSplitter(thinking)
        self._calls = None if tools is None else ToolCallParser(tools)

    @property
    def reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning, as far as is known."""
        return self._splitter.reasoning

    @property
    def called(self) -> bool:
        """Whether there are calls, each of them complete."""
        return self._calls is not None and self._calls.calls > 0 and self._calls.complete

    def push(self, text: str) -> AnswerDelta:
        reasoning, answer = self._splitter.push(text)
        parsed = Parsed(answer) if self._calls is None else self._calls.push(answer)
        return AnswerDelta(reasoning, parsed.content, tuple(parsed.calls))

    def flush(self) -> AnswerDelta:
        """What was held back, at the end of the text."""
        reasoning, answer = self._splitter.flush()
        if self._calls is None:
            return AnswerDelta(reasoning, answer)
        parsed = [self._calls.push(answer), self._calls.flush()]
        calls = tuple(call for part in parsed for call in part.calls)
        return AnswerDelta(reasoning, "".join(part.content for part in parsed), calls)
