"""Which tokens may come next in one output."""

from __future__ import annotations

from dataclasses import dataclass

import llguidance

from glm52_engine.structured.errors import GrammarError
from glm52_engine.tokenizer.marks import END_THINK

_END_THINK = END_THINK.encode()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What grammars know of a tokenizer; shared by all of them."""

    raw: llguidance.LLTokenizer
    token_bytes: tuple[bytes, ...]
    not_ends: bytes
    """The mask that allows everything but the ends of a generation."""

    @property
    def mask_bytes(self) -> int:
        return len(self.not_ends)


class Matcher:
    """Belongs to one sequence and one thread. A mask has a bit for each token id, lowest bit first in 32-bit words.

    `reasons`: the output begins with reasoning, which is free but has to end before the output does; the grammar
    begins behind it.
    """

    def __init__(self, raw: llguidance.LLMatcher, vocabulary: Vocabulary, *, reasons: bool) -> None:
        self.raw = raw
        self._vocabulary = vocabulary
        self._reasons = reasons
        self._tail = b""

    def fork(self) -> Matcher:
        """Another sequence that goes on from here; cheap, and safe while nobody advances this one."""
        fork = Matcher(self.raw.deep_copy(), self._vocabulary, reasons=self._reasons)
        fork._tail = self._tail
        return fork

    @property
    def reasons(self) -> bool:
        return self._reasons

    @property
    def ended(self) -> bool:
        """Whether nothing but the end may come."""
        return not self._reasons and self.raw.is_stopped()

    @property
    def mask_bytes(self) -> int:
        return self._vocabulary.mask_bytes

    def mask(self) -> bytes:
        """The tokens that may come next. The ends are among them exactly when the grammar can end here."""
        return self._vocabulary.not_ends if self._reasons else self.raw.compute_bitmask()

    def accept(self, token: int) -> None:
        """Advance by a token that was drawn. Raises GrammarError if it does not fit."""
        if self._reasons:
            # By letters and not by id: a model may spell the mark, and so do the splitter's readers.
            text = self._tail + self._vocabulary.token_bytes[token]
            self._reasons = _END_THINK not in text
            self._tail = text[-len(_END_THINK) :]
        else:
            self.raw.consume_token(token)
            self.check()

    def check(self) -> None:
        """Raises GrammarError once the grammar cannot go on: a mask that was too much work allows only the end."""
        if self.raw.is_error():
            raise GrammarError(f"the output left its grammar: {first_line(self.raw.get_error())}")


def first_line(text: str) -> str:
    """Of an error of the library, which adds its whole state behind."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown reason")
