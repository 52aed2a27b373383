"""GLM-5.2's forward pass on whole rows, differentiable: dense matrices under a mask instead of a paged cache.

The arithmetic is that of `glm52_engine.model`; parameters carry the names of the checkpoint. The selection of the
indexer is a mask, so the trained model has never seen another attention than the one it is served with. The indexer
learns by itself: its scores, as a distribution, follow that of the attention (mean over heads, in its own layer and
in those that share its selection); nothing flows from it into the rest, nor back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LATENT_NORM_EPS = 1e-6
_NEVER = -1e4
"""Instead of -inf under a logarithm: 0 × -inf is NaN."""


@dataclass
class Rows:
    """One batch: several conversations behind each other in every row. positions int64 and allowed bool [B, L(, L)]."""

    cos: Tensor
    sin: Tensor
    allowed: Tensor
    sparse: bool
    index_losses: list[Tensor] = field(default_factory=list)
    selected: Tensor | None = None
    index_log: Tensor | None = None


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: Tensor, rows: Rows) -> Tensor:
    """x [B, L, heads, dim]: pairs (2i, 2i+1)."""
    cos, sin = rows.cos.unsqueeze(2), rows.sin.unsqueeze(2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class Indexer(nn.Module):
    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        self.top_k = c["index_topk"]
        self.wq_b = _linear(c["q_lora_rank"], self.heads * self.dim)
        self.wk = _linear(c["hidden_size"], self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = _linear(c["hidden_size"], self.heads)

    def forward(self, hidden: Tensor, q_latent: Tensor, rows: Rows) -> None:
        """Leaves the selection and the scores' log-softmax in `rows` for this layer and those that share it."""
        key = self._rotate_first(self.k_norm(self.wk(hidden)).unsqueeze(2), rows).squeeze(2)
        query = self._rotate_first(self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim)), rows) * self.dim**-0.5
        weights = self.weights_proj(hidden) * self.heads**-0.5
        scores = key.new_zeros(rows.allowed.shape)
        for head in range(self.heads):
            per_head = (query[:, :, head] @ key.transpose(1, 2)).relu()
            scores = scores + weights[:, :, head].unsqueeze(-1) * per_head
        masked = scores.masked_fill(~rows.allowed, _NEVER)
        rows.index_log = masked.log_softmax(-1)
        if not rows.sparse:
            rows.selected = rows.allowed
            return
        # Among equal scores the lowest position wins; exact zeros are the ties that there are.
        order = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
        best = (masked.detach() - 1e-9 * order).topk(min(self.top_k, scores.shape[-1]), dim=-1).indices
        chosen = torch.zeros_like(rows.allowed).scatter_(-1, best, True)
        rows.selected = chosen & rows.allowed

    def _rotate_first(self, x: Tensor, rows: Rows) -> Tensor:
        return torch.cat((rotate(x[..., : self.rope], rows), x[..., self.rope :]), -1)


class Attention(nn.Module):
    def __init__(self, c: Mapping[str, Any], *, full: bool) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.latent, self.value = c["kv_lora_rank"], c["v_head_dim"]
        hidden = c["hidden_size"]
        self.q_a_proj = _linear(hidden, c["q_lora_rank"])
        self.q_a_layernorm = Norm(c["q_lora_rank"], _LATENT_NORM_EPS)
        self.q_b_proj = _linear(c["q_lora_rank"], self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = _linear(hidden, self.latent + self.rope)
        self.kv_a_layernorm = Norm(self.latent, _LATENT_NORM_EPS)
        self.kv_b_proj = _linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = _linear(self.heads * self.value, hidden)
        if full:
            self.indexer = Indexer(c)
        self.full = full

    def forward(self, hidden: Tensor, rows: Rows) -> Tensor:
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden))
        kv, shared_key = self.kv_a_proj_with_mqa(hidden).split((self.latent, self.rope), -1)
        if self.full:
            self.indexer(hidden.detach(), q_latent.detach(), rows)
        query = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1))
        nope, rope = query.split((self.nope, self.rope), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(kv)).unflatten(-1, (self.heads, -1))
        key, value = expanded.split((self.nope, self.value), -1)
        shared = rotate(shared_key.unsqueeze(2), rows).expand(-1, -1, self.heads, -1)
        query = torch.cat((nope, rotate(rope, rows)), -1).transpose(1, 2)
        scores = query @ torch.cat((key, shared), -1).permute(0, 2, 3, 1) * (self.nope + self.rope) ** -0.5
        if self.training:
            assert rows.index_log is not None
            attended = scores.detach().masked_fill(~rows.allowed.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
            rows.index_losses.append(-(attended * rows.index_log).sum(-1).mean())
        assert rows.selected is not None
        weights = scores.masked_fill(~rows.selected.unsqueeze(1), -torch.inf).softmax(-1)
        out: Tensor = self.o_proj((weights @ value.transpose(1, 2)).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, inner), _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Moe(nn.Module):
    """All experts on all tokens: with so small ones that is faster than sorting. Stacked as [experts, out, in]."""

    bias: Tensor
    load: Tensor

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner, self.experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        self.top_k, self.scale = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.gate = _linear(hidden, self.experts)
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("load", torch.zeros(self.experts))
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Parameter(torch.empty(self.experts, *shape))
            for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        self.shared_experts = Mlp(hidden, inner * c["n_shared_experts"])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.gate(flat).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, -1).indices
        picked = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load.copy_(picked.mean(0).detach())
        weights = scores * picked
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        gate = torch.einsum("th,eih->tei", flat, self.gate_proj)
        up = torch.einsum("th,eih->tei", flat, self.up_proj)
        inner = F.silu(gate) * up * weights.unsqueeze(-1)
        routed = torch.einsum("tei,ehi->th", inner, self.down_proj)
        shared: Tensor = self.shared_experts(x)
        return shared + routed.view_as(x)

    def balance(self, rate: float) -> None:
        """Towards equal load by the bias that takes part in the choice only."""
        self.bias += rate * torch.sign(self.top_k / self.experts - self.load)


class Layer(nn.Module):
    def __init__(self, c: Mapping[str, Any], index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c, full=c["indexer_types"][index] == "full")
        dense = index < c["first_k_dense_replace"]
        self.mlp = Mlp(c["hidden_size"], c["intermediate_size"]) if dense else Moe(c)

    def forward(self, hidden: Tensor, rows: Rows) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rows)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class Network(nn.Module):
    """`config` is the parsed config.json."""

    frequencies: Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, dim = config["hidden_size"], config["qk_rope_head_dim"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.norm = Norm(hidden, config["rms_norm_eps"])
        self.lm_head = _linear(hidden, config["vocab_size"])
        theta = config["rope_parameters"]["rope_theta"]
        self.register_buffer("frequencies", 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self._start(config["num_hidden_layers"])

    def _start(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 1.0 if name.startswith("embed") else weight.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std *= (2 * layers) ** -0.5
            if name.startswith("lm_head"):
                std *= 0.1
            nn.init.normal_(weight, std=std)

    def forward(self, ids: Tensor, positions: Tensor, allowed: Tensor, *, sparse: bool) -> tuple[Tensor, Tensor]:
        """ids, positions [B, L], allowed bool [B, L, L] → hidden [B, L, hidden] for lm_head, loss of the indexers."""
        angles = positions.float().unsqueeze(-1) * self.frequencies
        rows = Rows(angles.cos(), angles.sin(), allowed, sparse)
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, rows)
        index_loss = torch.stack(rows.index_losses).mean() if rows.index_losses else hidden.new_zeros(())
        return self.norm(hidden), index_loss

    def balance(self, rate: float) -> None:
        for layer in self.layers:
            if isinstance(layer.mlp, Moe):
                layer.mlp.balance(rate)

    def checkpoint(self) -> dict[str, Tensor]:
        """Tensors by the checkpoint's names, in bfloat16 but for the correction bias; on the CPU."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.named_parameters():
            full = name if name.startswith("lm_head") else f"model.{name}"
            if ".mlp." in full and full.endswith(("gate_proj", "up_proj", "down_proj")):
                prefix, _, part = full.rpartition(".")
                tensors |= {f"{prefix}.experts.{e}.{part}.weight": weight[e] for e in range(weight.shape[0])}
            else:
                tensors[full] = weight
        rounded = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mlp, Moe):
                name = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
                rounded[name] = layer.mlp.bias.detach().float().cpu().clone()
        return dict(sorted(rounded.items()))
