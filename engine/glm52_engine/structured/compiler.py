"""Grammars compiled off the event loop, once each, within bounds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance

from glm52_engine.structured.errors import GrammarError
from glm52_engine.structured.matcher import Matcher, Vocabulary, first_line
from glm52_engine.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 512 << 10
COMPILE_SECONDS = 10.0
CACHED_GRAMMARS = 128
COMPILING_THREADS = 2

# The library counts work and memory instead of time. A lexer state is one or two kB, and a sequence has its own lexer.
# Items grow with the square of an object's optional properties: the library's own bounds refuse a hundred of them.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=20_000, max_items_in_row=10_000, step_max_items=500_000, verbose_errors=False
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; any number of sequences, on any thread, start from it."""

    _raw: llguidance.LLMatcher
    _vocabulary: Vocabulary

    def matcher(self, *, reasons: bool = False) -> Matcher:
        return Matcher(self._raw.deep_copy(), self._vocabulary, reasons=reasons)


class GrammarCompiler:
    """One for a tokenizer; made on any thread (a second for 150,000 tokens), used from an event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _vocabulary(tokenizer)
        self._threads = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar")
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()

    async def compile(self, source: str) -> Grammar:
        """`source`: what `sources` or `tool_grammar` made. Raises GrammarError."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise GrammarError(f"it has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are compiled")
        running = self._cache.get(source)
        if running is None:
            running = self._cache[source] = self._threads.submit(self._compile, source)
        self._cache.move_to_end(source)
        while len(self._cache) > CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        compiled = asyncio.wrap_future(running)
        compiled.add_done_callback(_seen)
        try:
            # Shielded: others may wait for the same grammar, and a client that gave up will come again.
            return await asyncio.wait_for(asyncio.shield(compiled), COMPILE_SECONDS)
        except TimeoutError:
            raise GrammarError(f"compiling it takes more than {COMPILE_SECONDS:g} s; make it simpler") from None

    def _compile(self, source: str) -> Grammar:
        raw = llguidance.LLMatcher(self._vocabulary.raw, source, log_level=0, limits=_LIMITS)
        if raw.is_error():
            raise GrammarError(first_line(raw.get_error()))
        self._probe(raw)
        return Grammar(raw, self._vocabulary)

    def _probe(self, raw: llguidance.LLMatcher) -> None:
        """The first masks show what construction does not: a grammar too wide for a step, or one that fits nothing."""
        for opening in (b"", b"{", b"[", b'{"'):
            probe = raw.deep_copy()
            tokens = [self._vocabulary.token_bytes.index(bytes([byte])) for byte in opening]
            if probe.validate_tokens(tokens) < len(tokens):
                continue
            probe.consume_tokens(tokens)
            probe.compute_bitmask()
            if probe.is_error():
                reason = first_line(probe.get_error())
                raise GrammarError("no output fits it" if reason.startswith("NoExtension") else reason)


def _seen(future: asyncio.Future[Any]) -> None:
    """An error that nobody waited for any more is no news."""
    if not future.cancelled():
        future.exception()


class _Tokens:
    """The form in which the library takes a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = tokenizer.vocabulary()
        self.eos_token_id = min(tokenizer.eos_ids)
        # Not only those that the tokenizer calls special: no text may contain <tool_call> or </think> as a token.
        self.special_token_ids = sorted(tokenizer.added_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    tokens = _Tokens(tokenizer)
    raw = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(tokens), n_vocab=tokenizer.vocab_bound, eos_token=sorted(tokenizer.eos_ids)
    )
    mask = bytearray(-(-tokenizer.vocab_bound // 32) * 4)
    for token, text in enumerate(tokens.tokens):
        if text and token not in tokenizer.eos_ids:
            mask[token // 8] |= 1 << token % 8
    return Vocabulary(raw, tuple(tokens.tokens), bytes(mask))
