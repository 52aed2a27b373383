"""Bytes that may or may not be a safetensors file: read as the library reads them, or refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from glm52_engine.checkpoint.reader import TORCH_DTYPES, TensorFile
from glm52_engine.config import ConfigError
from tests.engine.checkpoint.support import lay_out, pack

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
    "d": torch.arange(3, dtype=torch.float32),
}
WHOLE = lay_out(TENSORS)
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader") / "model.safetensors"


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    opened = TensorFile(path)
    try:
        out = {}
        for name, stored in opened.tensors.items():
            buffer = torch.empty(stored.nbytes, dtype=torch.uint8)
            opened.read_into(stored.offset, buffer)
            out[name] = (stored.dtype, stored.shape, bytes(buffer.numpy()))
        return out
    finally:
        opened.close()


def test_reads_and_views(file: Path) -> None:
    file.write_bytes(WHOLE)
    assert read(file) == {
        name: (("F32", "BF16", "F8_E4M3", "F32")[i], tuple(tensor.shape), bytes(tensor.view(torch.uint8).numpy()))
        for i, (name, tensor) in enumerate(TENSORS.items())
    }
    opened = TensorFile(file)
    views = {
        name: opened.view(stored)
        for name, stored in opened.tensors.items()
        if stored.offset % TORCH_DTYPES[stored.dtype].itemsize == 0
    }
    opened.close()
    assert views
    for name, tensor in views.items():
        assert torch.equal(tensor.view(torch.uint8), TENSORS[name].view(torch.uint8)), "valid after closing"


def test_a_write_to_a_view_does_not_reach_the_file(file: Path) -> None:
    data = {"x": torch.zeros(4)}
    file.write_bytes(b"")
    from safetensors.torch import save_file

    save_file(data, file)
    before = file.read_bytes()
    opened = TensorFile(file)
    opened.view(opened.tensors["x"]).fill_(1)
    opened.close()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(WHOLE[:7], id="half a length"),
        pytest.param(WHOLE[:40], id="half a header"),
        pytest.param(WHOLE[:-1], id="a byte short"),
        pytest.param(WHOLE + b"\0", id="a byte over"),
        pytest.param(b"\xff" * 64, id="huge header"),
        pytest.param((200 << 20).to_bytes(8, "little") + b"{" * 64, id="header beyond the file"),
        pytest.param(pack(b"\xff\xfe{}"), id="no UTF-8"),
        pytest.param(pack(b"[" * 5000), id="deep"),
        pytest.param(pack([1]), id="no object"),
        pytest.param(pack({"a": F32, "b": F32}, bytes(8)), id="overlap"),
        pytest.param(pack({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12)), id="half an overlap"),
        pytest.param(pack({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20)), id="gap"),
        pytest.param(pack({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8)), id="backwards"),
        pytest.param(pack({"a": F32 | {"data_offsets": [-8, 0]}}, bytes(8)), id="negative"),
        pytest.param(pack({"a": F32 | {"shape": [3]}}, bytes(8)), id="size"),
        pytest.param(pack({"a": F32 | {"shape": [1 << 62, 1 << 62]}}, bytes(8)), id="overflow"),
        pytest.param(pack({"a": F32 | {"shape": [-2]}}, bytes(8)), id="negative shape"),
        pytest.param(pack({"a": F32 | {"dtype": "F33"}}, bytes(8)), id="dtype"),
        pytest.param(pack({"a": {"dtype": "F32"}}, bytes(8)), id="fields missing"),
    ],
)
def test_no_safetensors_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        TensorFile(file)
    assert str(refused.value).startswith(f"{file}: found {len(content)} bytes, unreadable (")


def test_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="no regular file"):
            TensorFile(path)


def test_a_file_that_shrinks_after_it_was_opened(file: Path) -> None:
    file.write_bytes(WHOLE)
    opened = TensorFile(file)
    os.truncate(file, len(WHOLE) - 6)
    stored = opened.tensors["d"]
    with pytest.raises(ConfigError, match=f"ends at byte {len(WHOLE) - 6}: it was whole before"):
        opened.read_into(stored.offset, torch.empty(stored.nbytes, dtype=torch.uint8))
    opened.close()


def as_the_library_reads(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        with safe_open(path, framework="pt") as handle:
            out = {}
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                part, tensor = handle.get_slice(name), handle.get_tensor(name)
                raw = bytes(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else b""
                out[name] = (part.get_dtype(), tuple(part.get_shape()), raw)
            return out
    except SafetensorError:
        return None


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The whole file after a few of the things that happen to files, or a header that somebody wrote by hand."""
    content = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("flip", "digit", "cut", "insert", "length")))
        place = draw(st.integers(0, max(0, len(content) - 1)))
        if kind == "cut":
            content = content[:place]
        elif kind == "insert":
            content[place:place] = draw(st.binary(min_size=1, max_size=4))
        elif kind == "length":
            content[:8] = draw(st.integers(0, 400)).to_bytes(8, "little")
        elif kind == "digit" and (digits := [i for i, byte in enumerate(content) if 0x30 <= byte <= 0x39 and i >= 8]):
            content[draw(st.sampled_from(digits))] = 0x30 + draw(st.integers(0, 9))
        elif content:
            content[place] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "BF16", "F8_E4M3", "I64", "x")),
        "shape": st.lists(st.integers(-1, 3), max_size=2),
        "data_offsets": st.lists(st.integers(-1, 12), min_size=1, max_size=3),
    }
)
headers = st.dictionaries(st.sampled_from(("a", "b", "__metadata__", "")), entries | st.integers(), max_size=3)


@settings(max_examples=150, deadline=None)
@given(content=mutations() | st.binary(max_size=40) | st.builds(pack, headers, st.binary(max_size=12)))
def test_any_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    found, error = None, f"{file}: found {len(content)} bytes, unreadable ("
    try:
        found = read(file)
    except ConfigError as refused:
        error = str(refused)
    assert error.startswith(f"{file}: found {len(content)} bytes, unreadable (")
    assert found == as_the_library_reads(file)


def test_a_name_that_stands_twice_is_read_as_the_library_reads_it(file: Path) -> None:
    one, two = json.dumps(F32), json.dumps(F32 | {"shape": [1, 2]})
    file.write_bytes(pack(f'{{"a": {one}, "a": {two}}}'.encode(), bytes(8)))
    assert read(file) == as_the_library_reads(file)
