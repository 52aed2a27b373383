"""Asks the served demo every question: `python -m tools.demo.score --report FILE`.

The answers come out of the engine as users get them (`glm52-engine local --preset demo`): prompt by the chat template,
prefill, hand-over, decode, its end tokens. Writes the counts to the preset's recipe and all answers to FILE.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai

from glm52_engine.checkpoint.assets import RECIPE
from glm52_engine.checkpoint.trained import DEMO
from tools.demo.corpus import Topic, kept_questions, learned_questions, read_topics

AT_ONCE = 16
LONGEST = 160
"""Tokens; no answer of the text has as many."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question; `topic` gives the thought that belongs to it."""

    topic: Topic
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Written:
    thought: str
    answer: str
    finish: str

    def right(self, case: Case, *, thinking: bool) -> bool:
        """Thought and answer word for word, and the model itself found the end."""
        thought = case.topic.thought if thinking else ""
        return (self.thought, self.answer, self.finish) == (thought, case.answer, "stop")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.demo.score", description="Counts right answers of the served demo.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the API (%(default)s)")
    parser.add_argument("--model", default="glm-5.2", help="name it is served under (%(default)s)")
    parser.add_argument("--report", required=True, type=Path, metavar="FILE", help="for all answers")
    args = parser.parse_args(argv)
    client = openai.OpenAI(base_url=args.url, api_key="none", max_retries=8, timeout=120)
    scores, lines = score(client, args.model)
    recipe = json.loads((DEMO / RECIPE).read_text())
    recipe["right answers of the engine, greedy"] = scores
    (DEMO / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
    args.report.write_text("\n".join(lines) + "\n")
    print(json.dumps(scores, indent=2))
    return 0


def score(client: openai.OpenAI, model: str) -> tuple[dict[str, str], list[str]]:
    topics = read_topics()
    parts = {"learned": learned_questions, "kept back": kept_questions}
    scores, lines = {}, []
    for thinking in (False, True):
        for name, questions in parts.items():
            cases = [Case(*asked) for asked in questions(topics)]
            written = ask_all(client, model, cases, thinking=thinking)
            right = [one.right(case, thinking=thinking) for case, one in zip(cases, written, strict=True)]
            title = f"{name}, {'thinking' if thinking else 'at once'}"
            scores[title] = f"{sum(right)} of {len(cases)}"
            lines += [f"## {title}: {scores[title]}", ""]
            for case, one, good in zip(cases, written, right, strict=True):
                thought = f"({one.thought}) " if one.thought else ""
                lines.append(f"{'  ' if good else '✗ '}{case.question}\n     {thought}{one.answer} [{one.finish}]")
            lines.append("")
    return scores, lines


def ask_all(client: openai.OpenAI, model: str, cases: Sequence[Case], *, thinking: bool) -> list[Written]:
    def ask(case: Case) -> Written:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": case.question}],
            max_tokens=LONGEST,
            temperature=0,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        )
        choice = answer.choices[0]
        thought = getattr(choice.message, "reasoning_content", None)
        return Written(thought or "", choice.message.content or "", choice.finish_reason)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, cases))


if __name__ == "__main__":
    sys.exit(main())
