"""From the text of one chat choice to what stands in its message, and in the deltas of its stream."""

from __future__ import annotations

import secrets
from typing import Any

from glm52_engine.serve.form import Schemas
from glm52_engine.tokenizer import AnswerDelta, AnswerParser, CallDelta, Thinking


class ChatText:
    """The one place where a chat choice's text becomes fields; whole answers go the same way as streamed ones.

    `schemas`: of the tools whose calls are looked for; None for none. `reasoning_tokens`: those of the reasoning and of
    the mark that ends it.
    """

    def __init__(self, thinking: Thinking, schemas: Schemas | None) -> None:
        self._parser = AnswerParser(thinking, schemas)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.reasoning_tokens = 0

    def push(self, text: str, finish: str | None) -> tuple[dict[str, Any], str | None]:
        """The fields of a delta that one token adds, none if it adds nothing yet, and the finish reason to show."""
        reasoned = self._parser.reasoning
        deltas = [self._parser.push(text)]
        self.reasoning_tokens += reasoned or self._parser.reasoning
        if finish:
            deltas.append(self._parser.flush())
        shown = "tool_calls" if finish == "stop" and self._parser.called else finish
        return self._fields(deltas), shown

    def message(self) -> dict[str, Any]:
        """All fields together, after the end."""
        content = "".join(self._content)
        message: dict[str, Any] = {"content": None if self._calls and not content else content, "refusal": None}
        message |= _reasoning("".join(self._reasoning))
        return {**message, "tool_calls": self._calls} if self._calls else message

    def _fields(self, deltas: list[AnswerDelta]) -> dict[str, Any]:
        reasoning = "".join(delta.reasoning for delta in deltas)
        content = "".join(delta.content for delta in deltas)
        calls = [self._call(call) for delta in deltas for call in delta.calls]
        self._reasoning.append(reasoning)
        self._content.append(content)
        fields = _reasoning(reasoning)
        if content:
            fields["content"] = content
        if calls:
            fields["tool_calls"] = calls
        return fields

    def _call(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self._calls.append(whole)
        return {"index": call.index, **whole, "function": dict(function)}


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names in use: clients of DeepSeek's and GLM's APIs read the one, those of vLLM the other."""
    return {"reasoning_content": text, "reasoning": text} if text else {}
