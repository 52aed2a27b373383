"""HF `config.json` of a `glm_moe_dsa` checkpoint → `ModelSpec`: every architecture field is read, none has a default.

A field that silently takes a default is how a GLM-5.2 checkpoint gets GLM-5's rope base or another top-k schedule:
the output then stays fluent and is wrong. Whatever is missing, contradicts or hides behind an alias is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from glm52_engine.checkpoint.fields import Fields, read_json_object
from glm52_engine.checkpoint.quantization import Quantization, parse_quantization

IndexerType = Literal["full", "shared"]
Dtype = Literal["float32", "bfloat16"]

ARCHITECTURE = "GlmMoeDsaForCausalLM"
MODEL_TYPE = "glm_moe_dsa"

_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "torch_dtype": "dtype",
}
"""Other names for the same thing: a reader that knows only one of the two names takes a default for the other."""

_FIXED: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "architectures": [ARCHITECTURE],
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
}
"""The only values that the model code implements."""

_FIXED_IF_PRESENT: dict[str, Any] = {
    "mlp_bias": False,
    "moe_router_dtype": "float32",
    "pretraining_tp": 1,
}
"""The same for what only some files say."""

_SPARSE_ATTENTION = ("indexed_attention", "deepseek_sparse_attention")
"""What `layer_types`, where a file has it, may call every layer."""

_MOST_LAYERS, _MOST_EXPERTS = 1024, 4096
"""Far above every model, so that a mistyped count is refused and not enumerated."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture of one checkpoint; sizes in elements, names as in HF's config.json.

    `dtype` is that of the computation and of every tensor that is not quantised.
    """

    dtype: Dtype
    quantization: Quantization | None
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[IndexerType, ...]
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    num_nextn_predict_layers: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_row(self) -> int:
        """Elements of one token's MLA row in one layer: normed latent, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with their own indexer, hence with an index key per token."""
        return tuple(_full(self.indexer_types))

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def read_model_spec(checkpoint: Path) -> ModelSpec:
    """Read and check `config.json` in a checkpoint directory; raises ConfigError."""
    path = checkpoint / "config.json"
    return parse_model_spec(read_json_object(path, "the checkpoint's config.json"), path)


def parse_model_spec(raw: dict[str, Any], path: Path) -> ModelSpec:
    """`raw` is the parsed config.json, `path` names it in errors."""
    fields = Fields(raw, path)
    # The architecture first: for another model every later complaint would mislead.
    for name, value in _FIXED.items():
        fields.exactly(name, value)
    for alias, name in _ALIASES.items():
        if alias in raw:
            fields.refuse(alias, raw[alias], f"no such key: the value belongs in {name}")
    for name, value in _FIXED_IF_PRESENT.items():
        fields.exactly_if_present(name, value)
    layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    heads = fields.count("num_attention_heads")
    fields.exactly("num_key_value_heads", heads)
    spec = ModelSpec(
        dtype=_dtype(fields),
        quantization=parse_quantization(fields, layers),
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        intermediate_size=fields.count("intermediate_size"),
        first_k_dense_replace=fields.count("first_k_dense_replace", least=0),
        moe_intermediate_size=fields.count("moe_intermediate_size"),
        n_routed_experts=fields.count("n_routed_experts", most=_MOST_EXPERTS),
        n_shared_experts=fields.count("n_shared_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        n_group=fields.count("n_group"),
        topk_group=fields.count("topk_group"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        index_topk=fields.count("index_topk"),
        index_n_heads=fields.count("index_n_heads"),
        index_head_dim=fields.count("index_head_dim"),
        indexer_types=_indexer_types(fields, layers),
        rope_theta=_rope_theta(fields),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        num_nextn_predict_layers=fields.count("num_nextn_predict_layers", least=0),
        eos_token_ids=_eos_token_ids(fields),
        pad_token_id=fields.count("pad_token_id", least=0),
    )
    _check_together(spec, fields)
    return spec


def _dtype(fields: Fields) -> Dtype:
    found = fields.get("dtype", "'float32' or 'bfloat16'")
    if found not in ("float32", "bfloat16"):
        fields.refuse("dtype", found, "'float32' or 'bfloat16'")
    return cast(Dtype, found)


def _rope_theta(fields: Fields) -> float:
    """From `rope_parameters`, from the older files' `rope_theta`, or from both where they agree."""
    if fields.raw.get("rope_scaling") is not None:
        fields.refuse("rope_scaling", fields.raw["rope_scaling"], "no scaling: GLM's rope has none")
    found = []
    if fields.raw.get("rope_theta") is not None:
        found.append(fields.number("rope_theta"))
    if not found or fields.raw.get("rope_parameters") is not None:
        expected = "{'rope_type': 'default', 'rope_theta': …} and no other key"
        nested = fields.nested("rope_parameters", expected)
        if set(nested.raw) != {"rope_type", "rope_theta"} or nested.raw["rope_type"] != "default":
            fields.refuse("rope_parameters", nested.raw, expected)
        found.append(nested.number("rope_theta"))
    if len(set(found)) > 1:
        fields.refuse("rope_theta", found[0], f"rope_parameters.rope_theta = {found[1]}, or no such key")
    if not found[0] > 1:
        fields.refuse("rope_theta", found[0], "a number > 1")
    return found[0]


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    expected = "a list of token ids"
    found = fields.get("eos_token_id", expected)
    if not isinstance(found, list) or not found or not all(type(token) is int and token >= 0 for token in found):
        fields.refuse("eos_token_id", found, expected)
    return tuple(found)


def _indexer_types(fields: Fields, layers: int) -> tuple[IndexerType, ...]:
    """The schedule of full and shared indexers, from whichever of the three notations the file has; all must agree.

    GLM-5 and GLM-5.1 have none of them and an indexer in every layer. That reading is safe to take here because the
    loader then insists on indexer weights in every layer, which a GLM-5.2 checkpoint does not have.
    """
    found: dict[str, tuple[IndexerType, ...]] = {}
    raw = fields.raw
    if raw.get("indexer_types") is not None:
        listed = raw["indexer_types"]
        if not isinstance(listed, list) or not all(kind in ("full", "shared") for kind in listed):
            fields.refuse("indexer_types", listed, "a list of 'full' and 'shared'")
        found["indexer_types"] = tuple(listed)
    if raw.get("index_topk_pattern") is not None:
        pattern = raw["index_topk_pattern"]
        if not isinstance(pattern, str) or set(pattern) - {"F", "S"}:
            fields.refuse("index_topk_pattern", pattern, "a string of F and S")
        found["index_topk_pattern"] = tuple(_kind(letter == "F") for letter in pattern)
    if raw.get("index_topk_freq") is not None or raw.get("index_skip_topk_offset") is not None:
        freq, offset = fields.count("index_topk_freq"), fields.count("index_skip_topk_offset")
        found["index_topk_freq/index_skip_topk_offset"] = tuple(
            _kind(max(layer - (offset - 1), 0) % freq == 0) for layer in range(layers)
        )
    if not found:
        return (_kind(True),) * layers
    name, types = next(iter(found.items()))
    for other, value in found.items():
        if value != types:
            fields.refuse(
                other, _full(value), f"the same schedule as {name}, which has these full layers: {_full(types)}"
            )
    if len(types) != layers:
        fields.refuse(name, f"{len(types)} entries", f"{layers} (num_hidden_layers)")
    if types[0] != "full":
        fields.refuse(name, types[0], "'full' for layer 0: a shared layer reuses the selection of a full one before it")
    return types


def _full(types: tuple[IndexerType, ...]) -> list[int]:
    return [layer for layer, kind in enumerate(types) if kind == "full"]


def _kind(full: bool) -> IndexerType:
    return "full" if full else "shared"


def _check_together(spec: ModelSpec, fields: Fields) -> None:
    """What no field can say alone."""
    fields.exactly_if_present("qk_head_dim", spec.qk_head_dim)
    head_dim = fields.get("head_dim", f"{spec.qk_nope_head_dim} or {spec.qk_rope_head_dim}")
    if head_dim not in (spec.qk_nope_head_dim, spec.qk_rope_head_dim):
        # Readers disagree on which of the two this key means; the model code uses neither from here.
        fields.refuse("head_dim", head_dim, "qk_nope_head_dim or qk_rope_head_dim")
    dense = min(spec.first_k_dense_replace, spec.num_hidden_layers)
    layer_types = fields.raw.get("layer_types")
    if layer_types not in (None, *([name] * spec.num_hidden_layers for name in _SPARSE_ATTENTION)):
        fields.refuse("layer_types", layer_types, f"{_SPARSE_ATTENTION[0]!r} for every layer")
    fields.exactly_if_present("mlp_layer_types", ["dense"] * dense + ["sparse"] * (spec.num_hidden_layers - dense))
    if spec.qk_rope_head_dim % 2:
        fields.refuse("qk_rope_head_dim", spec.qk_rope_head_dim, "an even number: rope rotates pairs")
    if spec.index_head_dim < spec.qk_rope_head_dim:
        fields.refuse("index_head_dim", spec.index_head_dim, f"at least qk_rope_head_dim = {spec.qk_rope_head_dim}")
    if spec.n_routed_experts % spec.n_group or spec.topk_group > spec.n_group:
        fields.refuse("n_group", spec.n_group, "a divisor of n_routed_experts, and at least topk_group")
    if spec.n_routed_experts // spec.n_group < 2:
        fields.refuse("n_group", spec.n_group, "at least two experts a group: groups are ranked by their best two")
    if spec.num_experts_per_tok > spec.n_routed_experts // spec.n_group * spec.topk_group:
        fields.refuse("num_experts_per_tok", spec.num_experts_per_tok, "no more than the experts in topk_group groups")
    for name, ids in (("eos_token_id", spec.eos_token_ids), ("pad_token_id", (spec.pad_token_id,))):
        if max(ids) >= spec.vocab_size:
            fields.refuse(name, ids, f"ids below vocab_size = {spec.vocab_size}")
