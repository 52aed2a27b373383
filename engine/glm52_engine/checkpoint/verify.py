"""Whether a checkpoint's files hold exactly the tensors that its config.json implies; what differs is named."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Set
from pathlib import Path

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.checkpoint.reader import Stored, few
from glm52_engine.checkpoint.tensors import (
    TensorSpec,
    expected_tensors,
    is_fp8,
    is_scale,
    mtp_names,
    scale_name,
    weight_of,
)
from glm52_engine.config import ConfigError

log = logging.getLogger(__name__)


def verify(checkpoint: Path, spec: ModelSpec, stored: Mapping[str, Stored]) -> dict[str, TensorSpec]:
    """The expected tensors, each of which is there as expected; MTP layers are recognised and left out with a word.

    Raises ConfigError.
    """
    mtp = {name for name in stored if _is_mtp(name, spec)}
    _check_mtp(checkpoint, spec, mtp)
    expected = expected_tensors(spec)
    _check_scales(checkpoint, spec, stored.keys() - mtp)
    _check_names(checkpoint, expected, stored.keys() - mtp)
    wrong = [
        f"{stored[name].path}: {name}: found {stored[name].dtype} {list(stored[name].shape)}, "
        f"expected {want.dtype} {list(want.shape)}"
        for name, want in expected.items()
        if (stored[name].shape, stored[name].dtype) != (want.shape, want.dtype)
    ]
    if wrong:
        raise ConfigError(few(wrong))
    return expected


def _is_mtp(name: str, spec: ModelSpec) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first = spec.num_hidden_layers
    return match is not None and first <= int(match[1]) < first + spec.num_nextn_predict_layers


def _check_mtp(checkpoint: Path, spec: ModelSpec, found: Set[str]) -> None:
    """Whole or absent: software that has no use for it drops it when it writes a checkpoint."""
    if not spec.num_nextn_predict_layers:
        return
    if not found:
        log.info("%s: has no tensors of a multi-token-prediction layer", checkpoint)
        return
    must, may = mtp_names(spec)
    problems = _differences(must, found, allowed=must | may)
    if problems:
        raise ConfigError(f"{checkpoint}: multi-token-prediction layer: {problems}")
    log.info("%s: left out %d tensors of the multi-token-prediction layer", checkpoint, len(found))


def _check_scales(checkpoint: Path, spec: ModelSpec, found: Set[str]) -> None:
    """Said before names are compared: "unknown tensor" would not tell what is wrong with a quantised checkpoint."""
    scales = {name for name in found if is_scale(name)}
    if spec.quantization is None:
        if scales:
            raise ConfigError(
                f"{checkpoint}: found {few(scales)}; expected no scales, "
                "since config.json has no quantization_config (or give it the one of the FP8 checkpoint)"
            )
        return
    weights = {name for name in found if is_fp8(name)}
    lonely = {scale_name(name) for name in weights} - scales
    if lonely:
        raise ConfigError(f"{checkpoint}: missing {few(lonely)}: an FP8 weight is nothing without its scales")
    surplus = {name for name in scales - {scale_name(weight) for weight in weights} if weight_of(name) in found}
    if surplus:
        raise ConfigError(f"{checkpoint}: found {few(surplus)}; expected no scales for what is not stored in FP8")


def _check_names(checkpoint: Path, expected: Mapping[str, TensorSpec], found: Set[str]) -> None:
    problems = _differences(expected.keys(), found, allowed=expected.keys())
    if problems:
        raise ConfigError(
            f"{checkpoint}: found {len(found)} tensors, expected the {len(expected)} that config.json implies: "
            + problems
        )


def _differences(must: Set[str], found: Set[str], *, allowed: Set[str]) -> str:
    problems = []
    if missing := must - found:
        problems.append(f"missing {few(missing)}")
    if extra := found - allowed:
        problems.append(f"unknown {few(extra)}")
    return "; ".join(problems)
