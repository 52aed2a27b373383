"""Greedy answers of the network in training, and how many are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.demo.corpus import prompt
from tools.demo.network import Network

LONGEST = 140


@dataclass(frozen=True, slots=True)
class Score:
    right: int
    lines: list[str]


@torch.no_grad()
def greedy_answers(
    network: Network, tokenizer: Tokenizer, config: Mapping[str, Any], questions: Sequence[str], *, thinking: bool
) -> list[str]:
    """All at once, the whole row anew for every token: simple, and it needs no cache that could be wrong."""
    device = network.lm_head.weight.device
    prompts = [tokenizer.encode(prompt(q, thinking=thinking), add_special_tokens=False).ids for q in questions]
    ends = torch.tensor(config["eos_token_id"], device=device)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    width = int(lengths.max()) + LONGEST
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, one in enumerate(prompts):
        ids[row, : len(one)] = torch.tensor(one, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    every, first = torch.arange(len(prompts), device=device), lengths.clone()
    for _ in range(LONGEST):
        length = int(lengths.max())
        positions = torch.arange(length, device=device).expand(len(prompts), -1)
        allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(len(prompts), -1, -1)
        hidden, _ = network(ids[:, :length], positions, allowed, sparse=True)
        token = network.lm_head(hidden[every, lengths - 1]).argmax(-1)
        done |= torch.isin(token, ends)
        if bool(done.all()):
            break
        ids[every, lengths] = torch.where(done, ids[every, lengths], token)
        lengths = torch.where(done, lengths, lengths + 1)
    written = []
    for row in range(len(prompts)):
        text = tokenizer.decode(ids[row, first[row] : lengths[row]].tolist(), skip_special_tokens=False)
        written.append(text if bool(done[row]) else text + " … (no end)")
    return written


def judge(asked: Sequence[tuple[str, str]], written: Sequence[str]) -> Score:
    """Right: the text behind the thought is the answer word for word."""
    right, lines = 0, []
    for (question, answer), text in zip(asked, written, strict=True):
        same = text.rpartition("</think>")[2] == answer
        right += same
        lines.append(f"{'  ' if same else '✗ '}{question}\n     {text}")
    return Score(right, lines)
