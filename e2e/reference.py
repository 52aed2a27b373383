"""The oracle: greedy tokens of `transformers` on the same checkpoint, one request at a time, float32 on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Reference:
    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import GlmMoeDsaForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        model: Any = GlmMoeDsaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` token ids after `prompt`, each the argmax of the whole sequence computed anew: no cache to trust."""
        ids = list(prompt)
        with self._torch.inference_mode():
            for _ in range(count):
                logits = self._model(self._torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids.append(int(logits.argmax()))
        return ids[len(prompt) :]
