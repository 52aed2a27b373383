"""Whatever a model draws under a grammar fits it, ends when it can, and bad grammars are refused in words."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
import torch

from glm52_engine.structured import Grammar, GrammarCompiler, GrammarError, compiler, sources
from glm52_engine.structured.masks import forbid
from glm52_engine.tokenizer import Tokenizer
from tests.engine.structured.support import accepts, allowed, babble

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 3},
        "more": {"$ref": "#/$defs/flag"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": ["boolean", "null"]}},
}


async def test_every_output_fits_the_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = await compiler.compile(sources.json_schema(PERSON))
    for seed in range(20):
        jsonschema.validate(json.loads(babble(grammar.matcher(), tokenizer, seed)), PERSON)


@pytest.mark.parametrize(
    ("source", "fits", "others"),
    [
        (sources.json_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '{"a": 1,}', "{}x"]),
        (sources.json_schema(True), ["1", "[]", '"x"', "null"], ["x", ""]),
        (sources.json_schema({"const": "ü"}), ['"ü"'], ["ü", '"u"']),
        (sources.regex(r"^[a-c]+-\d{2}$"), ["a-12", "cab-00"], ["a-1", "-12", "a-123"]),
        (sources.choice(["yes", 'n"o\n', "é/\\"]), ["yes", 'n"o\n', "é/\\"], ["y", "yesyes", ""]),
        (sources.grammar('root ::= "a" ("b" | "c")+'), ["ab", "acb"], ["a", "b"]),
        (sources.grammar('start: "a" B\nB: /[0-9]+/'), ["a1", "a22"], ["a", "1"]),
    ],
)
async def test_what_fits(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, fits: list[str], others: list[str]
) -> None:
    grammar = await compiler.compile(source)
    assert [accepts(grammar.matcher(), tokenizer, text) for text in fits] == [True] * len(fits)
    assert [accepts(grammar.matcher(), tokenizer, text) for text in others] == [False] * len(others)


async def test_white_space_cannot_go_on_for_ever(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = await compiler.compile(sources.json_object())
    for space in ("", " ", "\n", "\r\n\t", "\n" + " " * 40):
        assert accepts(grammar.matcher(), tokenizer, "{" + space + "}")
    for space in (" " * 9, "\n\n", "\n" + " " * 99):
        assert not accepts(grammar.matcher(), tokenizer, "{" + space + "}")


async def test_no_mark_stands_in_a_string(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = (await compiler.compile(sources.json_schema({"type": "string"}))).matcher()
    for token in tokenizer.encode('"a'):
        matcher.accept(token)
    assert not tokenizer.added_ids & set(allowed(matcher))


async def test_the_end_is_allowed_exactly_when_the_grammar_can_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = (await compiler.compile(sources.regex("ab?"))).matcher()
    assert not tokenizer.eos_ids & set(allowed(matcher))
    matcher.accept(tokenizer.encode("a")[0])
    assert tokenizer.eos_ids < set(allowed(matcher))
    matcher.accept(tokenizer.encode("b")[0])
    assert tokenizer.eos_ids == set(allowed(matcher))


async def test_a_matcher_continues_from_the_tokens_of_another(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = await compiler.compile(sources.json_schema(PERSON))
    there, here = grammar.matcher(), grammar.matcher()
    there.accept(tokenizer.encode("{")[0])
    assert here.mask() != there.mask()
    here.accept(tokenizer.encode("{")[0])
    assert here.mask() == there.mask()


async def test_forks_go_on_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    start = (await compiler.compile(sources.regex("ab|ac"))).matcher(reasons=True)
    for token in tokenizer.encode("hm</think>a"):
        start.accept(token)
    one, other = start.fork(), start.fork()
    assert (accepts(one, tokenizer, "b"), accepts(other, tokenizer, "c")) == (True, True)
    assert (one.ended, start.ended) == (True, False)


async def test_reasoning_is_free_but_has_to_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = (await compiler.compile(sources.choice(["yes"]))).matcher(reasons=True)
    everything = set(range(tokenizer.vocab_bound)) - tokenizer.eos_ids
    assert set(allowed(matcher)) == everything
    for token in tokenizer.encode("I think {</thin"):
        matcher.accept(token)
    assert set(allowed(matcher)) == everything
    matcher.accept(tokenizer.encode("</think>")[0])
    assert accepts(matcher, tokenizer, "yes")


async def test_reasoning_ends_also_when_the_mark_is_spelled(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = (await compiler.compile(sources.choice(["yes"]))).matcher(reasons=True)
    for token in (token for letter in "x</think>" for token in tokenizer.encode(letter)):
        matcher.accept(token)
    assert accepts(matcher, tokenizer, "yes")


async def test_a_token_that_does_not_fit_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = (await compiler.compile(sources.choice(["yes"]))).matcher()
    with pytest.raises(GrammarError, match="left its grammar"):
        matcher.accept(tokenizer.encode("n")[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sources.json_schema({"type": "objec"}), "objec"),
        (lambda: sources.json_schema({"not": {}}), 'Unimplemented keys: \\["not"\\]'),
        (lambda: sources.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (lambda: sources.json_schema({"$ref": "http://x/y"}), "http://x/y"),
        (lambda: sources.json_schema({"$ref": "#"}), "no output fits"),
        (lambda: sources.json_schema([]), "found \\[\\]"),
        (lambda: sources.json_schema({"const": "x" * compiler.MAX_SOURCE_CHARACTERS}), "at most 524288"),
        (lambda: sources.regex("(a"), "invalid regex"),
        (lambda: sources.regex(r"(a+)\1"), "invalid regex"),
        (lambda: sources.choice([]), "nothing to choose"),
        (lambda: sources.grammar("start: nothere"), "nothere"),
        (lambda: sources.grammar("x" * 70_000), "at most 65536"),
        (lambda: sources.grammar("root ::= ("), "GBNF"),
    ],
)
async def test_bad_grammars(tiny_compiler: GrammarCompiler, make: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as refused:
        await tiny_compiler.compile(make())
    assert len(str(refused.value)) < 300


async def test_a_schema_too_wide_for_one_step_is_refused_before_it_runs(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_LIMITS", llguidance.LLParserLimits(max_items_in_row=20, verbose_errors=False))
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    with pytest.raises(GrammarError, match="max is 20"):
        await GrammarCompiler(Tokenizer.load(tiny_checkpoint)).compile(sources.json_schema(schema))


async def test_an_object_with_many_optional_properties(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"properties": {f"prop_{i}": {"type": "string"} for i in range(200)}}
    grammar = await compiler.compile(sources.json_schema({"type": "object", **schema}))
    assert accepts(grammar.matcher(), tokenizer, '{"prop_3": "a", "prop_150": "b"}')


async def test_deep_schemas_do_not_break_anything(tiny_compiler: GrammarCompiler) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="recursion"):
        await tiny_compiler.compile(sources.json_schema(schema))


async def test_compiled_once_and_forgotten_in_time(
    tiny_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = []
    compile_one = tiny_compiler._compile
    monkeypatch.setattr(tiny_compiler, "_compile", lambda source: (count.append(source), compile_one(source))[1])
    monkeypatch.setattr(compiler, "CACHED_GRAMMARS", 2)
    a, b, c = (sources.regex(letter) for letter in "abc")
    first, second = await asyncio.gather(tiny_compiler.compile(a), tiny_compiler.compile(a))
    assert first is second
    for source in (b, a, c, a, b):
        await tiny_compiler.compile(source)
    assert count == [a, b, c, b]


async def test_the_loop_goes_on_while_a_grammar_is_compiled(
    tiny_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compile_one = threading.Event(), tiny_compiler._compile

    def slow(source: str) -> Grammar:
        gate.wait(10)
        return compile_one(source)

    monkeypatch.setattr(tiny_compiler, "_compile", slow)
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.01)
    with pytest.raises(GrammarError, match="takes more than"):
        await tiny_compiler.compile(sources.regex("slow"))
    gate.set()
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 10)
    assert await tiny_compiler.compile(sources.regex("slow"))


async def test_only_rows_with_a_grammar_are_masked(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    yes = await compiler.compile(sources.choice(["yes"]))
    no = await compiler.compile(sources.regex("n+"))
    shared = no.matcher()
    matchers = [None, yes.matcher(), shared, yes.matcher(reasons=True), shared]
    logits = torch.zeros(5, tokenizer.vocab_bound + 50)
    forbid(logits, matchers)
    assert bool(logits[0].isfinite().all())
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            assert logits[row].isfinite().nonzero().flatten().tolist() == allowed(matcher)
