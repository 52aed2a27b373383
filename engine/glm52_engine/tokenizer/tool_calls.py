"""GLM's tool calls in text that comes in pieces → calls with JSON arguments, as OpenAI's clients read them.

A call: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`, with white space between the marks
allowed. Values have no type; the tool's schema gives it. String values are passed on while they are written.
Nothing is lost: what is no call, or stands where nothing may stand in one, is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from glm52_engine.tokenizer.arguments import allowed_types, argument_schema, to_json
from glm52_engine.tokenizer.marks import CALL, END_CALL, END_KEY, END_VALUE, KEY, VALUE
from glm52_engine.tokenizer.partial import possible_start

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_MAYBE_NAME = re.compile(r"\s{0,16}[a-zA-Z0-9_.:/-]{0,128}\s{0,16}")

MAX_KEY_CHARACTERS = 1024
"""What is longer is no key: it is passed on instead of kept."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call. The first piece has the name; the pieces' arguments join to one JSON object."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What one piece of text added."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _State(Enum):
    TEXT = "outside of calls"
    NAME = "behind <tool_call>"
    BETWEEN = "behind the name or a value"
    STRAY = "text where only a mark may stand"
    KEY = "in a key"
    AFTER_KEY = "behind a key"
    STRING = "in a value that can only be a string"
    VALUE = "in any other value"


class ToolCallParser:
    """`tools`: name → JSON schema of the parameters. A call of another name is a call, its values typed by their look.

    Wherever the text is cut into pieces, the content and each call's arguments join to the same.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._state = _State.TEXT
        self._held = ""
        self._space = ""  # outside of calls, not passed on yet
        self._fresh = True  # no content since the last call, or the beginning
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._written: list[str] = []
        self._schema: Mapping[str, Any] = {}
        self._any_argument = False
        self._parsed = Parsed()
        self._steps: dict[_State, Callable[[], bool]] = {
            _State.TEXT: self._text,
            _State.NAME: self._name,
            _State.BETWEEN: self._between,
            _State.STRAY: self._stray,
            _State.KEY: self._in_key,
            _State.AFTER_KEY: self._after_key,
            _State.STRING: self._string,
            _State.VALUE: self._value,
        }
        self.calls = 0
        """Calls that have begun."""

    @property
    def complete(self) -> bool:
        """Whether no call is unfinished."""
        return self._state is _State.TEXT

    def push(self, text: str) -> Parsed:
        self._held += text
        while self._steps[self._state]():
            pass
        return self._given()

    def flush(self) -> Parsed:
        """At the end of the text: an unfinished call ends as it stands, its arguments cut off where the text was."""
        rest, self._held = self._held, ""
        if self._state in (_State.TEXT, _State.NAME):
            self._outside(rest if self._state is _State.TEXT else CALL + rest)
            self._state = _State.TEXT
            self._content("" if self._fresh and self.calls else self._space)
        elif self._state in (_State.BETWEEN, _State.STRAY):
            self._content(rest)
        elif self._state is _State.KEY:
            self._argument(json.dumps(rest, ensure_ascii=False)[:-1])
        elif self._state is _State.AFTER_KEY:
            self._argument(json.dumps(self._key, ensure_ascii=False) + (": " + rest if rest else ""))
        elif self._state is _State.STRING:
            self._arguments(_escaped(rest))
        else:
            self._argument(f"{json.dumps(self._key, ensure_ascii=False)}: {''.join(self._written)}{rest}")
        return self._given()

    def _given(self) -> Parsed:
        given, self._parsed = self._parsed, Parsed()
        return given

    def _text(self) -> bool:
        at = self._held.find(CALL)
        if at < 0:
            self._outside(self._take(len(self._held) - possible_start(self._held, (CALL,))))
            return False
        self._outside(self._take(at))
        self._take(len(CALL))
        self._state = _State.NAME
        return True

    def _name(self) -> bool:
        at, mark = self._first(KEY, END_CALL, CALL)
        before = self._held[:at]
        if mark in (KEY, END_CALL) and _MAYBE_NAME.fullmatch(before) and before.strip():
            self._take(at)
            self._begin(before.strip())
            return True
        if not mark and _MAYBE_NAME.fullmatch(before):
            return False
        # No call after all: the mark was text, and what follows it may hold a true one.
        self._state = _State.TEXT
        self._outside(CALL)
        return True

    def _begin(self, name: str) -> None:
        self._space, self._fresh = "", True
        self._schema = self._tools.get(name, {})
        self._any_argument = False
        self._parsed.calls.append(CallDelta(self.calls, name))
        self.calls += 1
        self._state = _State.BETWEEN

    def _between(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(KEY):
            self._take(len(KEY))
            self._state = _State.KEY
            return True
        if self._held.startswith((END_CALL, CALL)):
            # A call that begins before the last one ended has ended it.
            if self._held.startswith(END_CALL):
                self._take(len(END_CALL))
            self._end()
            return True
        if any(mark.startswith(self._held) for mark in (KEY, END_CALL, CALL)):
            return False
        self._state = _State.STRAY
        return True

    def _stray(self) -> bool:
        at, mark = self._first(KEY, END_CALL, CALL)
        self._content(self._take(at))
        if mark:
            self._state = _State.BETWEEN
        return bool(mark)

    def _in_key(self) -> bool:
        at, mark = self._first(END_KEY, VALUE, KEY, END_CALL, CALL)
        if at > MAX_KEY_CHARACTERS:
            self._content(KEY)
            self._state = _State.STRAY
            return True
        if not mark:
            return False
        if mark in (END_KEY, VALUE):  # the end of a key is now and then forgotten
            self._key = self._take(at).strip()
            self._take(len(END_KEY) if mark == END_KEY else 0)
            self._state = _State.AFTER_KEY
        else:
            self._content(KEY + self._take(at))
            self._state = _State.BETWEEN
        return True

    def _after_key(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(VALUE):
            self._take(len(VALUE))
            self._types = allowed_types(argument_schema(self._schema, self._key), self._schema)
            self._written = []
            self._state = _State.VALUE
            if self._types == {"string"}:
                self._state = _State.STRING
                self._argument(json.dumps(self._key, ensure_ascii=False) + ': "')
            return True
        if VALUE.startswith(self._held):
            return False
        self._content(KEY + self._key + END_KEY)
        self._state = _State.STRAY
        return True

    def _string(self) -> bool:
        at, mark = self._first(END_VALUE)
        self._arguments(_escaped(self._take(at)))
        if mark:
            self._take(len(mark))
            self._arguments('"')
            self._state = _State.BETWEEN
        return bool(mark)

    def _value(self) -> bool:
        at, mark = self._first(END_VALUE)
        self._written.append(self._take(at))
        if mark:
            self._take(len(mark))
            key = json.dumps(self._key, ensure_ascii=False)
            self._argument(f"{key}: {to_json(''.join(self._written), self._types)}")
            self._state = _State.BETWEEN
        return bool(mark)

    def _end(self) -> None:
        self._arguments("}" if self._any_argument else "{}")
        self._state = _State.TEXT

    def _argument(self, text: str) -> None:
        """The beginning of a member of the object."""
        self._arguments((", " if self._any_argument else "{") + text)
        self._any_argument = True

    def _arguments(self, text: str) -> None:
        if not text:
            return
        calls, index = self._parsed.calls, self.calls - 1
        if calls and calls[-1].index == index:
            last = calls.pop()
            calls.append(CallDelta(index, last.name, last.arguments + text))
        else:
            calls.append(CallDelta(index, None, text))

    def _content(self, text: str) -> None:
        self._parsed.content += text

    def _outside(self, text: str) -> None:
        """Content outside of calls. White space at its end waits: in front of a call, and behind one, it is none."""
        bare = text.rstrip()
        if bare:
            self._content(self._space + bare)
            self._space, self._fresh = "", False
        self._space += text[len(bare) :]

    def _first(self, *marks: str) -> tuple[int, str]:
        """Where the first of `marks` begins and which it is; without one, up to where the text is surely none."""
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        return min(found) if found else (len(self._held) - possible_start(self._held, marks), "")

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
