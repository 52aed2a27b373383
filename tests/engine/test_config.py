"""The contract: what a wrong configuration says, and what a termination message keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from glm52_engine.config import (
    EXIT_CODES,
    TERMINATION_MESSAGE_LIMIT,
    ConfigError,
    DrainConfig,
    EngineConfig,
    ModelConfig,
    Outcome,
    RoleConfig,
    StoreConfig,
    Termination,
    read_engine_config,
)


def valid() -> dict[str, Any]:
    role = {"ranks_per_host": 1, "host_pool_gib": 1, "max_num_seqs": 4}
    return {
        "model": {"name": "m", "path": "/models/m", "max_model_len": 128, "weights_gib": 1},
        "prefill": role,
        "decode": role,
        "drain": {"window_seconds": 10},
    }


def test_a_rendered_config_reads_back_equal(tmp_path: Path) -> None:
    config = EngineConfig.model_validate(valid())
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    assert read_engine_config(file) == config


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        pytest.param(("model", "max_model_len"), 0, "model.max_model_len", id="zero"),
        pytest.param(("model", "kv_cache_dtype"), "int4", "model.kv_cache_dtype", id="KV in a dtype of no engine"),
        pytest.param(("prefill", "ranks_per_host"), 1.5, "prefill.ranks_per_host", id="fractional"),
        pytest.param(("decode", "max_num_seqs"), "4", "decode.max_num_seqs", id="wrong type"),
        pytest.param(("drain", "windowSeconds"), 3, "drain.windowSeconds", id="unknown field"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path: Path, path: tuple[str, str], value: object, said: str) -> None:
    raw = valid()
    raw[path[0]] = {**raw[path[0]], path[1]: value}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as error:
        read_engine_config(file)
    assert str(file) in str(error.value)
    assert said in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_engine_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_engine_config(tmp_path / "absent.json")


@given(st.text(max_size=20_000))
def test_a_termination_message_always_fits_and_reads_back(message: str) -> None:
    sent = Termination(outcome=Outcome.CRASHED, role="decode", host="h", message=message)
    text = sent.encode()
    assert len(text.encode()) <= TERMINATION_MESSAGE_LIMIT
    read = Termination.decode(text)
    assert read is not None
    assert read.outcome is Outcome.CRASHED
    assert read.message == message or message.startswith(read.message.removesuffix("…"))


@given(st.text(max_size=3000), st.lists(st.text(max_size=300), max_size=20))
def test_log_lines_give_way_to_the_reason_oldest_first(message: str, log: list[str]) -> None:
    sent = Termination(outcome=Outcome.CRASHED, role="decode", host="h", message=message, log=tuple(log))
    text = sent.encode()
    read = Termination.decode(text)
    assert len(text.encode()) <= TERMINATION_MESSAGE_LIMIT
    assert read is not None
    assert read.log == sent.log[len(sent.log) - len(read.log) :]
    assert read.message == message or not read.log


def test_words_of_a_newer_engine_are_understood_as_far_as_they_are_known() -> None:
    read = Termination.decode('{"outcome": "Crashed", "role": "decode", "host": "h", "message": "m", "new": 1}')
    assert read is not None
    assert read.message == "m"


@pytest.mark.parametrize("text", ["", "Killed", "{}", '{"outcome": "Odd"}'])
def test_foreign_last_words_are_not_taken_for_ours(text: str) -> None:
    assert Termination.decode(text) is None


def test_every_outcome_has_its_own_exit_code() -> None:
    assert set(EXIT_CODES) == set(Outcome)
    assert len(set(EXIT_CODES.values())) == len(Outcome)
    assert EXIT_CODES[Outcome.DRAINED] == 0


def test_either_role_may_have_a_part_of_the_store() -> None:
    store = StoreConfig(master="chat-store.ns.svc:50051", store_gib=1)
    role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=1, store=store)
    model = ModelConfig(name="m", path="/models/x", max_model_len=16, weights_gib=1)
    drain = DrainConfig(window_seconds=1)
    assert EngineConfig(model=model, prefill=role, drain=drain).role("prefill").store == store
    assert EngineConfig(model=model, decode=role, drain=drain).role("decode").store == store
    for wrong in ("chat-store", "chat-store:", ":50051", "a b:1", "a:1:2"):
        with pytest.raises(ValidationError, match="master"):
            StoreConfig(master=wrong, store_gib=1)
