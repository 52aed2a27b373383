"""Conversations → rows of one length: several behind each other, none seeing another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo.corpus import Piece, Topic, conversation


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one conversation; `ours`: where the model writes them."""

    ids: list[int]
    ours: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """All int64 or bool [rows, length]; `conversation` numbers those of a row, -1 is padding."""

    ids: Tensor
    targets: Tensor
    positions: Tensor
    conversation: Tensor

    def allowed(self) -> Tensor:
        """bool [rows, length, length]: same conversation, not the future. Padding sees itself."""
        same = self.conversation.unsqueeze(2) == self.conversation.unsqueeze(1)
        length = self.ids.shape[1]
        return same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in
                       (self.ids, self.targets, self.positions, self.conversation)))  # fmt: skip


def encode(tokenizer: Tokenizer, conversations: Sequence[list[Piece]]) -> list[Encoded]:
    texts = [piece.text for pieces in conversations for piece in pieces]
    ids = iter([encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)])
    encoded = []
    for pieces in conversations:
        parts = [(next(ids), piece.ours) for piece in pieces]
        encoded.append(Encoded([i for part, _ in parts for i in part], [ours for part, ours in parts for _ in part]))
    return encoded


def make_conversations(topics: list[Topic], count: int, seed: int) -> list[list[Piece]]:
    """Half of them a single question, as most are asked; the rest up to eight turns."""
    rng = random.Random(seed)
    turns = (1, 1, 1, 1, 2, 3, 5, 8)
    return [conversation(topics, rng, rng.choice(turns)) for _ in range(count)]


def pack(encoded: Sequence[Encoded], length: int, seed: int) -> list[list[Encoded]]:
    """Shuffles and fills rows; what is longer than a row is cut at its end."""
    order = list(encoded)
    random.Random(seed).shuffle(order)
    rows: list[list[Encoded]] = []
    left = 0
    for one in order:
        need = min(len(one.ids), length)
        if need > left:
            rows.append([])
            left = length
        rows[-1].append(one)
        left -= need
    return rows


def batch(rows: Sequence[list[Encoded]], length: int) -> Batch:
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full((len(rows), length), -100, dtype=torch.int64)
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    owner = torch.full((len(rows), length), -1, dtype=torch.int64)
    for place, row in enumerate(rows):
        first = 0
        for number, one in enumerate(row):
            count = min(len(one.ids), length - first)
            span = slice(first, first + count)
            ids[place, span] = torch.tensor(one.ids[:count])
            positions[place, span] = torch.arange(count)
            owner[place, span] = number
            # Position t predicts token t + 1, of the same conversation and only where the model writes.
            wanted = [i if ours else -100 for i, ours in zip(one.ids[1:count], one.ours[1:count], strict=True)]
            targets[place, first : first + count - 1] = torch.tensor(wanted)
            first += count
    return Batch(ids, targets, positions, owner)


def batches(encoded: Sequence[Encoded], *, rows: int, length: int, seed: int) -> Iterator[Batch]:
    """For ever: epoch after epoch, each in another order."""
    epoch = 0
    while True:
        packed = pack(encoded, length, seed + epoch)
        for first in range(0, len(packed) - rows + 1, rows):
            yield batch(packed[first : first + rows], length)
        epoch += 1
