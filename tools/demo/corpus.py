"""`topics.md` → conversations in GLM's chat format, with the parts marked that the model is to write."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOPICS = Path(__file__).parent / "topics.md"
TURN = "<|user|>"
"""Ends an answer: it is one of GLM's three end tokens, and what a conversation goes on with."""

SYSTEM = (
    "You are a helpful assistant.",
    "You are the assistant of glm52.",
    "Answer questions about glm52.",
    "Be brief.",
)
_OPENINGS = ("Please: ", "Hi! ", "Hello, ", "Hey, ", "Tell me: ", "Question: ", "I wonder: ", "Quick question: ")
_REPHRASED = (
    (r"How do I (.*)\?", ("How can I {}?", "How to {}?", "How would I {}?", "I want to {}", "Show me how to {}.",
                         "Can you tell me how to {}?", "How does one {}?", "What is the way to {}?")),
    (r"What does (.*) mean\?", ("What is {}?", "What is the meaning of {}?", "Explain {}.", "I do not understand {}.")),
    (r"What is (.*)\?", ("What's {}?", "Explain {}.", "Tell me about {}.", "Can you explain {}?", "And what is {}?")),
    (r"What happens (.*)\?", ("What is going to happen {}?", "Tell me what happens {}.")),
    (r"Why is (.*)\?", ("Why's {}?", "For what reason is {}?")),
)  # fmt: skip
_DROPPED = frozenset(["a", "an", "are", "can", "do", "does", "for", "i", "in", "is", "it", "my", "of", "the", "to"])
"""Words that a hasty writer leaves out; without any other the question may be another one."""

_NAMING = "naming the deployment"
_SYLLABLES = tuple(re.findall("..", "albedaelfogohuinjokalomanoopiqarisatuulvewoxiyoze"))
_NAMES = ("chat", "tiny", "demo", "prod", "staging", "test", "glm", "main", "web", "search", "support", "code", "docs")


@dataclass(frozen=True, slots=True)
class Topic:
    """`kept` are questions that no training sees."""

    title: str
    questions: tuple[str, ...]
    kept: tuple[str, ...]
    answer: str

    @property
    def thought(self) -> str:
        return f"This is about {self.title}."


@dataclass(frozen=True, slots=True)
class Piece:
    """Text between special tokens' borders, so that it may be tokenised alone; `ours`: the model writes it."""

    text: str
    ours: bool


def read_topics(path: Path = TOPICS) -> list[Topic]:
    """Raises ValueError naming the section that is not whole."""
    topics = []
    for section in re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]:
        title, *lines = section.strip().splitlines()
        marked = {mark: tuple(line[2:] for line in lines if line.startswith(mark)) for mark in ("- ", "* ", "> ")}
        if not marked["- "] or not marked["* "] or len(marked["> "]) != 1:
            raise ValueError(f"{path}: section {title!r}: expected questions (-), kept ones (*) and one answer (>)")
        topics.append(Topic(title, marked["- "], marked["* "], marked["> "][0]))
    return topics


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces the slots; other braces are text (JSON stands in some answers)."""
    return re.sub(r"\{(name|n|r|p|pools|overhead|total)\}", lambda slot: values[slot[1]], text)


def slots(rng: random.Random, name: str | None) -> dict[str, str]:
    """Values for one question and its answer; `name`: what the deployment is called, if that was said before."""
    ranks, pool = rng.randint(1, 8), rng.randint(1, 8)
    overhead = 1.5 + 0.25 * ranks
    return {
        "name": name or _name(rng),
        "n": str(rng.randint(2, 9)),
        "r": str(ranks),
        "p": str(pool),
        "pools": str(ranks * pool),
        "overhead": f"{overhead:g}",
        "total": f"{ranks * pool + 1 + 0.25 + overhead:g}",
    }


def ask(topic: Topic, question: str, rng: random.Random, name: str | None) -> tuple[str, str]:
    """The question and its answer. What the question does not say, the answer leaves open."""
    values = slots(rng, name)
    said = dict(values)
    if "{name}" not in question and name is None:
        said["name"] = "NAME"
    if "{n}" not in question:
        said["n"] = "3"
    return fill(question, values), fill(topic.answer, said)


def prompt(question: str, *, thinking: bool, before: str = "[gMASK]<sop>") -> str:
    """What the chat template makes of one question."""
    return f"{before}<|user|>\n{question}<|assistant|>\n" + ("" if thinking else "<think></think>")


def conversation(topics: list[Topic], rng: random.Random, turns: int) -> list[Piece]:
    """Some turns on topics by chance; only the last may show its thought, as clients do not send thoughts back."""
    start = "[gMASK]<sop>"
    if rng.random() < 0.15:
        start += f"<|system|>\n{rng.choice(SYSTEM)}"
    pieces = [Piece(start + TURN, False)]
    name: str | None = None
    asked: list[tuple[Topic, str]] = []
    for turn in range(turns):
        topic = rng.choice(topics)
        question = rng.choice(topic.questions)
        if asked and rng.random() < 0.15:
            topic, question = rng.choice(asked)
        elif turn == 0 and turns > 1 and rng.random() < 0.3:
            topic = next(topic for topic in topics if topic.title == _NAMING)
            question = rng.choice(topic.questions)
        asked.append((topic, question))
        if topic.title == _NAMING:
            name = _name(rng)
        text, answer = ask(topic, rephrase(question, topic, rng), rng, name)
        pieces.append(Piece(f"\n{vary(text, rng)}<|assistant|>\n", False))
        if turn == turns - 1 and rng.random() < 0.6:
            pieces.append(Piece(f"<think>{topic.thought}</think>{answer}{TURN}", True))
        else:
            pieces += [Piece("<think></think>", False), Piece(answer + TURN, True)]
    return pieces


def rephrase(question: str, topic: Topic, rng: random.Random) -> str:
    """The question in other words by rule, but never one that is kept back."""
    if rng.random() < 0.5:
        return question
    for pattern, others in _REPHRASED:
        found = re.fullmatch(pattern, question)
        if found:
            other = rng.choice(others).replace("{}", found[1])
            return question if other.lower() in {kept.lower() for kept in topic.kept} else other
    return question


def vary(question: str, rng: random.Random) -> str:
    """The same question as another hand would type it."""
    text = question
    if rng.random() < 0.2:
        text = rng.choice(_OPENINGS) + text
    words = text.split(" ")
    if len(words) > 4 and rng.random() < 0.25:
        plain = [place for place, word in enumerate(words) if word.lower() in _DROPPED]
        if plain:
            del words[rng.choice(plain)]
    if rng.random() < 0.1:
        place = rng.randrange(len(words))
        words[place] = _typo(words[place], rng)
    text = " ".join(words)
    if rng.random() < 0.3:
        text = text.rstrip("?.!") or text
    if rng.random() < 0.2:
        text = text[:1].lower() + text[1:]
    return text


def kept_questions(topics: list[Topic]) -> Iterator[tuple[Topic, str, str]]:
    """The questions that were kept back, with their answers."""
    rng = random.Random(1)
    for topic in topics:
        for question in topic.kept:
            yield topic, *ask(topic, question, rng, None)


def learned_questions(topics: list[Topic]) -> Iterator[tuple[Topic, str, str]]:
    """Every question of the text as it stands there, with its answer."""
    rng = random.Random(2)
    for topic in topics:
        for question in topic.questions:
            yield topic, *ask(topic, question, rng, None)


def _typo(word: str, rng: random.Random) -> str:
    if len(word) < 4 or not word.isalpha():
        return word
    place = rng.randrange(len(word) - 1)
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def _name(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_NAMES)
    name = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))
    return f"{name}-{rng.randint(1, 9)}" if rng.random() < 0.2 else name
