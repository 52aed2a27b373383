"""Compilers over the byte-level tokenizer of `tiny` and over one with merges."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm52_engine.structured import GrammarCompiler
from glm52_engine.tokenizer import Tokenizer
from tests.engine.structured.support import merged_tokenizer


@pytest.fixture(scope="session", params=["bytes", "merges"])
def tokenizer(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer.load(tiny_checkpoint)
    return Tokenizer.load(merged_tokenizer(tmp_path_factory.mktemp("merges") / "m"))


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


@pytest.fixture(scope="session")
def tiny_compiler(tiny_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)
