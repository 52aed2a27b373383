"""The demo's text: whole, in the form that the chat template gives, tokenised as it will be when it is served."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from glm52_engine.checkpoint import make_checkpoint
from glm52_engine.checkpoint.assets import SPECIAL_TOKENS, special_token_id
from glm52_engine.tokenizer import Tokenizer
from tools.demo.batches import batch, encode, make_conversations, pack
from tools.demo.corpus import Topic, ask, conversation, prompt, read_topics, rephrase
from tools.demo.vocabulary import learn_merges, tokenizer_of

TOPICS = read_topics()


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    texts = [piece.text for pieces in make_conversations(TOPICS, 200, seed=1) for piece in pieces]
    return tokenizer_of(learn_merges(texts, 200))


def test_no_question_is_learned_and_kept_back_or_asked_twice() -> None:
    questions = [question.lower() for topic in TOPICS for question in (*topic.questions, *topic.kept)]
    assert sorted(questions) == sorted(set(questions))


def test_a_section_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "topics.md").write_text("# Text\n## draining\n- How?\n> So.\n")
    with pytest.raises(ValueError, match="section 'draining'"):
        read_topics(tmp_path / "topics.md")


def test_what_a_question_does_not_say_the_answer_leaves_open() -> None:
    topic = Topic("t", (), (), "scale {name} to {n} of {}")
    rng = random.Random(1)
    assert ask(topic, "Scale?", rng, None) == ("Scale?", "scale NAME to 3 of {}")
    assert ask(topic, "Scale?", rng, "chat") == ("Scale?", "scale chat to 3 of {}")
    asked, answer = ask(topic, "{name} {n}", rng, None)
    assert answer == "scale {} to {} of {{}}".format(*asked.split())


def test_the_memory_sum_is_the_operators() -> None:
    from glm52_engine.config import RoleConfig
    from glm52_engine.sizing import gib, host_memory

    topic = next(topic for topic in TOPICS if topic.title == "a memory sum")
    rng = random.Random(0)
    for _ in range(20):
        asked, answer = ask(topic, "{r} {p}", rng, None)
        ranks, pool = map(int, asked.split())
        role = RoleConfig(ranks_per_host=ranks, host_pool_gib=pool, max_num_seqs=1)
        memory = host_memory(role, weights_gib=1, accelerator="cpu")
        assert answer.endswith(f"a pod asks for {gib(memory.per_host)}.")
        assert f"= {gib(memory.host_pools)} of host pools" in answer
        assert f"{gib(memory.overhead)} of overhead" in answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint("tiny", out)
    return Tokenizer.load(out)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_prompt_is_what_the_template_makes(served: Tokenizer, thinking: bool) -> None:
    rendered = served.render_chat([{"role": "user", "content": "How?"}], enable_thinking=thinking)
    assert prompt("How?", thinking=thinking) == rendered


def test_a_conversation_is_what_the_template_makes(served: Tokenizer) -> None:
    for seed in range(20):
        text = "".join(piece.text for piece in conversation(TOPICS, random.Random(seed), 4))
        start, *turns = text.split("<|user|>\n")
        messages = [{"role": "system", "content": start.split("<|system|>\n")[1]}] if "<|system|>" in start else []
        for turn in turns:
            question, answer = turn.split("<|assistant|>\n")
            thought, content = answer.removeprefix("<think>").removesuffix("<|user|>").split("</think>")
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": content, "reasoning_content": thought})
        rendered = served.render_chat(messages, add_generation_prompt=False)
        assert rendered + "<|user|>" == text


def test_pieces_are_tokenised_as_the_whole_is(tokenizer: tokenizers.Tokenizer) -> None:
    conversations = make_conversations(TOPICS, 50, seed=3)
    for pieces, encoded in zip(conversations, encode(tokenizer, conversations), strict=True):
        whole = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
        assert encoded.ids == whole.ids


def test_the_merged_vocabulary_has_the_special_tokens_behind_it(tokenizer: tokenizers.Tokenizer) -> None:
    # They are in the text that it learns from, and a merge that spells one would take its id.
    merged = json.loads(tokenizer.to_str())["model"]["vocab"]
    assert 256 < len(merged) < 256 + 200
    expected = [special_token_id(token, len(merged) - 256) for token in SPECIAL_TOKENS]
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == expected
    assert tokenizer.decode(tokenizer.encode("How do I scale décode?").ids) == "How do I scale décode?"


def test_conversations_in_one_row_do_not_see_each_other(tokenizer: tokenizers.Tokenizer) -> None:
    encoded = encode(tokenizer, make_conversations(TOPICS, 12, seed=4))
    packed = pack(encoded, 2000, seed=0)
    made = batch(packed, 2000)
    allowed = made.allowed()
    first, second = packed[0][0], packed[0][1]
    border = len(first.ids)
    assert not allowed[0, border : border + len(second.ids), :border].any()
    assert not allowed[0, :border, border:].any()
    assert made.positions[0, border] == 0
    # The token before the border predicts nothing: what comes next is another conversation.
    assert made.targets[0, border - 1] == -100
    wanted = [i for i, ours in zip(first.ids, first.ours, strict=True) if ours]
    assert made.targets[0, :border][made.targets[0, :border] >= 0].tolist() == wanted


def test_no_kept_question_comes_back_by_a_rule() -> None:
    topic = Topic("t", ("How do I scale?",), ("How can I scale?",), "so")
    rng = random.Random(0)
    made = {rephrase("How do I scale?", topic, rng) for _ in range(300)}
    assert "How to scale?" in made
    assert "How can I scale?" not in made
