"""Kernels run on the GPU where there is one, and in Triton's interpreter on the CPU where there is none."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined: no other test may have imported the kernels before.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    # Two thirds of the interpreter's time: triton.language is prepared anew for every call of every function, and all
    # integers are computed a second time, in 64 bits, to see whether they overflow.
    patched: set[str] = set()

    def patch_once(fn, patch=interpreter._patch_lang):
        if fn.__module__ not in patched:
            patch(fn)
            patched.add(fn.__module__)
        return interpreter._LangPatchScope()

    # The interpreter loses the carry into the exponent when it rounds to FP8 (127 becomes 64), and cuts bfloat16 off.
    rounded = {"fp8e4nv": (torch.float8_e4m3fn, torch.uint8), "bf16": (torch.bfloat16, torch.uint16)}

    def convert(x, of, to, rounding, convert=interpreter._convert_float):
        if str(of) != "fp32" or str(to) not in rounded:
            return convert(x, of, to, rounding)
        dtype, same_size = rounded[str(to)]
        return torch.from_numpy(x.copy()).to(dtype).view(same_size).numpy()

    # It keeps bfloat16 as integers, and would multiply those.
    def dot(builder, a, b, *rest, dot=interpreter.InterpreterBuilder.create_dot):
        wide = [builder.cast_impl(x, interpreter.tl.float32) if str(x.dtype) == "bf16" else x for x in (a, b)]
        return dot(builder, *wide, *rest)

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._convert_float = convert
    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.fixture(scope="session")
def gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def device(gpu: bool) -> str:
    return "cuda" if gpu else "cpu"


@pytest.fixture(scope="session")
def dtype(gpu: bool) -> torch.dtype:
    return torch.bfloat16 if gpu else torch.float32


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(52)
