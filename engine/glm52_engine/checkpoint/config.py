"""HF `config.json` of a `glm_moe_dsa` checkpoint → `ModelSpec`: every architecture field is read, none has a default.

A field that silently takes a default is how a GLM-5.2 checkpoint gets GLM-5's rope base or another top-k schedule:
the output then stays fluent and is wrong. Whatever is missing, contradicts or hides behind an alias is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from glm52_engine.config import ConfigError

IndexerType = Literal["full", "shared"]
Dtype = Literal["float32", "bfloat16"]

ARCHITECTURE = "GlmMoeDsaForCausalLM"
MODEL_TYPE = "glm_moe_dsa"

_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "rope_theta": "rope_parameters.rope_theta",
    "rope_scaling": "rope_parameters",
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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture of one checkpoint; sizes in elements, names as in HF's config.json."""

    dtype: Dtype
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
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind == "full")

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def read_model_spec(checkpoint: Path) -> ModelSpec:
    """Read and check `config.json` in a checkpoint directory; raises ConfigError."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected the checkpoint's config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); expected the checkpoint's config.json") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: found a JSON {type(raw).__name__}; expected an object")
    return parse_model_spec(raw, path)


def parse_model_spec(raw: dict[str, Any], path: Path) -> ModelSpec:
    """`raw` is the parsed config.json, `path` names it in errors."""
    fields = _Fields(raw, path)
    # The architecture first: for another model every later complaint would mislead.
    for name, value in _FIXED.items():
        fields.exactly(name, value)
    for alias, name in _ALIASES.items():
        if alias in raw:
            fields.refuse(alias, raw[alias], f"no such key: the value belongs in {name}")
    if raw.get("quantization_config") is not None:
        fields.refuse(
            "quantization_config", raw["quantization_config"], "an unquantised checkpoint (float32 or bfloat16)"
        )
    layers = fields.count("num_hidden_layers")
    heads = fields.count("num_attention_heads")
    fields.exactly("num_key_value_heads", heads)
    spec = ModelSpec(
        dtype=fields.dtype(),
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
        n_routed_experts=fields.count("n_routed_experts"),
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


class _Fields:
    """Typed access to config.json; every refusal names the file, the field, what was found and what was expected."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw = raw
        self._path = path

    def refuse(self, name: str, found: object, expected: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {name}: found {found!r}; expected {expected}")

    def get(self, name: str, expected: str) -> Any:
        if name not in self.raw:
            raise ConfigError(f"{self._path}: {name}: missing; expected {expected}")
        return self.raw[name]

    def exactly(self, name: str, value: object) -> None:
        found = self.get(name, repr(value))
        # True == 1 in Python: a JSON true must not pass for a count.
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            self.refuse(name, found, repr(value))

    def exactly_if_present(self, name: str, value: object) -> None:
        if self.raw.get(name) is not None:
            self.exactly(name, value)

    def count(self, name: str, least: int = 1) -> int:
        expected = f"an integer ≥ {least}"
        found = self.get(name, expected)
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            self.refuse(name, found, expected)
        return found

    def number(self, name: str) -> float:
        found = self.get(name, "a number > 0")
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            self.refuse(name, found, "a number > 0")
        return float(found)

    def flag(self, name: str) -> bool:
        found = self.get(name, "true or false")
        if not isinstance(found, bool):
            self.refuse(name, found, "true or false")
        return found

    def dtype(self) -> Dtype:
        found = self.get("dtype", "'float32' or 'bfloat16'")
        if found not in ("float32", "bfloat16"):
            self.refuse("dtype", found, "'float32' or 'bfloat16'")
        return cast(Dtype, found)


def _rope_theta(fields: _Fields) -> float:
    expected = "{'rope_type': 'default', 'rope_theta': …} and no other key"
    found = fields.get("rope_parameters", expected)
    if not isinstance(found, dict) or set(found) != {"rope_type", "rope_theta"} or found["rope_type"] != "default":
        fields.refuse("rope_parameters", found, expected)
    theta = found["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 1:
        fields.refuse("rope_parameters.rope_theta", theta, "a number > 1")
    return float(theta)


def _eos_token_ids(fields: _Fields) -> tuple[int, ...]:
    expected = "a list of token ids"
    found = fields.get("eos_token_id", expected)
    if not isinstance(found, list) or not found or not all(type(token) is int and token >= 0 for token in found):
        fields.refuse("eos_token_id", found, expected)
    return tuple(found)


def _indexer_types(fields: _Fields, layers: int) -> tuple[IndexerType, ...]:
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
            fields.refuse(other, value, f"the same schedule as {name}: {types}")
    if len(types) != layers:
        fields.refuse(name, f"{len(types)} entries", f"{layers} (num_hidden_layers)")
    if types[0] != "full":
        fields.refuse(name, types[0], "'full' for layer 0: a shared layer reuses the selection of a full one before it")
    return types


def _kind(full: bool) -> IndexerType:
    return "full" if full else "shared"


def _check_together(spec: ModelSpec, fields: _Fields) -> None:
    """What no field can say alone."""
    fields.exactly_if_present("qk_head_dim", spec.qk_head_dim)
    head_dim = fields.get("head_dim", f"{spec.qk_nope_head_dim} or {spec.qk_rope_head_dim}")
    if head_dim not in (spec.qk_nope_head_dim, spec.qk_rope_head_dim):
        # Readers disagree on which of the two this key means; the model code uses neither from here.
        fields.refuse("head_dim", head_dim, "qk_nope_head_dim or qk_rope_head_dim")
    dense = min(spec.first_k_dense_replace, spec.num_hidden_layers)
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
