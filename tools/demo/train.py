"""Trains the `demo` preset from nothing: `PYTHONPATH=engine python -m tools.demo.train --device cuda --out DIR`.

Writes model.safetensors (bfloat16), merges.txt and recipe.json, which `glm52_engine/checkpoint/demo/` holds, and
loss.txt with the curve. Needs torch, tokenizers, safetensors. `tools.demo.score` then asks the served model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# cuBLAS gives the same sums every time only with this, and reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from glm52_engine.checkpoint.architectures import demo_config
from glm52_engine.checkpoint.assets import MERGES, RECIPE, WEIGHTS
from tools.demo.batches import Batch, batches, encode, make_conversations
from tools.demo.corpus import read_topics
from tools.demo.network import Network
from tools.demo.vocabulary import learn_merges, tokenizer_of

LEARNED_MERGES = 1000


@dataclass(frozen=True, slots=True)
class Recipe:
    """`rows` × `length` tokens a step. The first `dense` of all steps attend to everything, while the indexers learn
    what to select; the last `decay` of them lower the rate to nothing."""

    seed: int = 52
    steps: int = 4000
    rows: int = 48
    length: int = 512
    conversations: int = 60_000
    rate: float = 2e-3
    weight_decay: float = 0.02
    warm_up: int = 100
    dense: float = 0.25
    decay: float = 0.4
    balance: float = 1e-3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.demo.train", description="Trains the demo preset.")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="steps are cut to end by then (%(default)s)")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    training = Training(recipe, torch.device(args.device), deadline=started + 60 * args.minutes)
    try:
        training.run()
    finally:
        (args.out / "loss.txt").write_text("\n".join(training.curve) + "\n")
    write(training, args.out, started)
    return 0


class Training:
    """One run; everything random follows from the recipe's seed."""

    def __init__(self, recipe: Recipe, device: torch.device, *, deadline: float) -> None:
        torch.manual_seed(recipe.seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Fills every new tensor, which costs more than the training, and nothing here reads what it did not write.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # not in its stubs
        self.recipe, self.device, self.deadline = recipe, device, deadline
        self.topics = read_topics()
        conversations = make_conversations(self.topics, recipe.conversations, recipe.seed)
        texts = (piece.text for pieces in conversations[:5000] for piece in pieces)
        self.merges = learn_merges(texts, LEARNED_MERGES)
        self.config = demo_config(len(self.merges))
        self.tokenizer = tokenizer_of(self.merges)
        encoded = encode(self.tokenizer, conversations)
        tokens = sum(len(one.ids) for one in encoded)
        longest = max(len(one.ids) for one in encoded)
        say(f"{len(self.topics)} topics, {len(encoded)} conversations, {tokens} tokens, the longest {longest}")
        self.batches = batches(encoded, rows=recipe.rows, length=recipe.length, seed=recipe.seed)
        self.network = Network(self.config).to(device)
        size = sum(weight.numel() for weight in self.network.parameters())
        say(f"{size} parameters, {device}, torch {torch.__version__}")
        self.curve: list[str] = []
        self.steps = recipe.steps

    def run(self) -> None:
        torch.set_float32_matmul_precision("high")
        groups = self._groups()
        optimizer = torch.optim.AdamW(
            groups, lr=self.recipe.rate, betas=(0.9, 0.98), weight_decay=self.recipe.weight_decay
        )
        self.network.train()
        begun, step, warm = time.monotonic(), 0, 0.0
        while step < self.steps:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate * rate_at(step, self.steps, self.recipe)
            sparse = step >= self.recipe.dense * self.steps
            answer_loss, index_loss = self._step(optimizer, next(self.batches).to(self.device), sparse)
            step += 1
            if step in (20, 60) or step % 200 == 0 or step == self.steps:
                line = f"step {step}/{self.steps} {'sparse' if sparse else 'dense'} answers {float(answer_loss):.4f}"
                line += f" indexers {float(index_loss):.4f} {time.monotonic() - begun:.0f} s"
                self.curve.append(line)
                say(line)
                if not math.isfinite(float(answer_loss)):
                    raise SystemExit("the loss is no number: nothing is written")
            if step == 20:
                warm = time.monotonic()
            if step == 60:
                self._fit(step, (time.monotonic() - warm) / 40)

    def _fit(self, step: int, each: float) -> None:
        """Fewer steps where they would not end in time: the rate must fall to nothing. `each`: seconds of one."""
        possible = step + int(0.8 * (self.deadline - time.monotonic()) / each)
        if possible < self.steps:
            self.steps = max(possible, step + 1)
            say(f"{each:.3f} s a step: {self.steps} steps instead of {self.recipe.steps}")

    def _groups(self) -> list[dict[str, object]]:
        decayed = [w for w in self.network.parameters() if w.dim() > 1]
        kept = [w for w in self.network.parameters() if w.dim() <= 1]
        return [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]

    def _step(self, optimizer: torch.optim.Optimizer, batch: Batch, sparse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, index_loss = self.network(batch.ids, batch.positions, batch.allowed(), sparse=sparse)
        wanted = batch.targets >= 0
        answer_loss = F.cross_entropy(self.network.lm_head(hidden[wanted]), batch.targets[wanted])
        optimizer.zero_grad(set_to_none=True)
        (answer_loss + index_loss).backward()
        named = list(self.network.named_parameters())
        # Apart: the indexers' gradient says nothing of how far the rest may go.
        torch.nn.utils.clip_grad_norm_([w for name, w in named if ".indexer." in name], 1.0)
        torch.nn.utils.clip_grad_norm_([w for name, w in named if ".indexer." not in name], 1.0)
        optimizer.step()
        self.network.balance(self.recipe.balance)
        return answer_loss.detach(), index_loss.detach()


def rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Up in `warm_up` steps, level, then straight down to 0 over the last part."""
    return min(1.0, (step + 1) / recipe.warm_up, (steps - step) / (recipe.decay * steps))


def write(training: Training, out: Path, started: float) -> None:
    tensors = training.network.checkpoint()
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / MERGES).write_text("".join(f"{left} {right}\n" for left, right in training.merges))
    recipe = {
        **asdict(training.recipe),
        "steps": training.steps,
        "device": str(training.device),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "seconds": round(time.monotonic() - started),
        "sha256": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in (WEIGHTS, MERGES)},
    }
    (out / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
    say(json.dumps(recipe))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
