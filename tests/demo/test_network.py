"""The network in training is the model that is served: same tensors, same logits, same selection."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from glm52_engine.checkpoint.architectures import demo_config
from tests.engine.model.support import Ours
from tools.demo.network import Network

LENGTH = 120


def test_the_engine_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = demo_config(1000)
    network = Network(config).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(weight.bfloat16())
    for layer in list(network.layers)[1:]:
        layer.mlp.bias.normal_(std=0.1)
    tensors = {name: tensor.float() for name, tensor in network.checkpoint().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))

    ids = torch.randint(0, 1277, (1, LENGTH))
    positions = torch.arange(LENGTH).unsqueeze(0)
    allowed = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.no_grad():
        sparse, dense = (network.lm_head(network(ids, positions, allowed, sparse=way)[0])[0] for way in (True, False))
    served = Ours(tmp_path).all_logits(ids[0].tolist())
    # Near-ties of random weights may select another token somewhere; nearly all rows agree to rounding.
    close = (sparse - served).abs().amax(-1) < 1e-4
    assert close.float().mean() > 0.9
    assert (dense - served).abs().amax(-1)[config["index_topk"] + 20 :].min() > 1e-3, "the selection matters"
