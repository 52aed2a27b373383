"""How far our GPU path is from transformers in float32, and how far transformers in bfloat16 is, at full layer size.

    python -m bench.parity [--out docs/benchmarks] [--fp8]

Random weights make near-ties between experts, and in bfloat16 one in some rows falls the other way: such a row is off
by a tenth whoever computes it. Medians over rows therefore compare the arithmetic, and the share of rows that are off
by more than 5 % compares how often ties fall. With --fp8 ours reads the weights in FP8, transformers their values; once
with KV in bfloat16 and once with KV in FP8, of which transformers knows nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from bench import shapes
from bench.decode import Ours

LENGTHS = (300, 2500)
ROWS = 64


def apart(found: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Of relative distances per row, [T, N] each: the median, and the share above 5 %."""
    each = (found.float() - truth.float()).norm(dim=-1) / truth.float().norm(dim=-1)
    return {"median": round(float(each.median()), 4), "share_off": round(float((each > 0.05).float().mean()), 3)}


@torch.inference_mode()
def prefill(model: Any, truth: Any, weights: Any, length: int, kv: str) -> dict[str, Any]:
    """Hidden states before each layer and logits, of the last rows of one prompt."""
    ours = Ours(weights, 1, length, identical=False, kv=kv)
    trace: list[torch.Tensor] = []
    at = torch.arange(length, device="cuda")
    last = at[-ROWS:]
    logits = ours.prefill.run(ours.prompts[0], at, ours.step.table[:1].expand(length, -1), length, last, trace=trace)
    theirs = model(ours.prompts, output_hidden_states=True)
    exact = truth(ours.prompts, output_hidden_states=True)
    report: dict[str, Any] = {}
    for layer, mine in enumerate(trace):
        want = exact.hidden_states[layer][0, -ROWS:]
        report[f"layer {layer}"] = {
            "ours": apart(mine[-ROWS:], want), "transformers": apart(theirs.hidden_states[layer][0, -ROWS:], want),
        }  # fmt: skip
    want = exact.logits[0, -ROWS:]
    report["logits"] = {"ours": apart(logits, want), "transformers": apart(theirs.logits[0, -ROWS:], want)}
    return report


@torch.inference_mode()
def decode(model: Any, truth: Any, weights: Any, length: int, kv: str, rows: int = 16) -> dict[str, Any]:
    """Logits of one decode step after the prefill of different prompts."""
    ours = Ours(weights, rows, length, identical=False, kv=kv)
    ours.fill()
    ours.reset()
    more = torch.cat((ours.prompts, ours.logits.argmax(1, keepdim=True)), 1)
    ours.step.run()
    want = torch.cat([truth(ids[None], logits_to_keep=1).logits[0] for ids in more])
    theirs = torch.cat([model(ids[None], logits_to_keep=1).logits[0] for ids in more])
    return {"ours": apart(ours.step.logits, want), "transformers": apart(theirs, want)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--fp8", action="store_true", help="weights in FP8; writes parity-fp8.json")
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    weights = shapes.random_weights(shapes.spec(), "cuda", fp8=chosen.fp8)
    model, truth = shapes.transformers_model(weights), shapes.transformers_model(weights).float()
    report: dict[str, Any] = {}
    for kv, length in itertools.product(("bf16", "fp8") if chosen.fp8 else ("bf16",), LENGTHS):
        of = "" if kv == "bf16" else ", KV in FP8"
        found = {
            f"prefill {length}{of}": prefill(model, truth, weights, length, kv),
            f"decode {length}{of}": decode(model, truth, weights, length, kv),
        }
        print(json.dumps(found), flush=True)
        report |= found
    (chosen.out / ("parity-fp8.json" if chosen.fp8 else "parity.json")).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
