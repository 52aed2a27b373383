"""Compiles the kernels for a Hopper card, which needs none: `python -m tests.engine.hisparse.compiled`.

In a process of its own: where the tests run without a GPU, kernels are Triton's interpreter's.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glm52_engine.kernels import hisparse
from glm52_engine.kernels.residency import POISON

HOPPER = GPUTarget("cuda", 90, 32)

KERNELS: list[tuple[Any, str, dict[str, Any], int]] = [
    (hisparse._begin, "*i32 *i32 *i32 *i32 i32 i32 i32", {"BT": 64, "BG": 32, "PDL": True}, 4),
    (hisparse._begin_whole, "*i32 *i64 *i32 *i32 i32 i32 i32", {"BT": 64, "PDL": True}, 4),
    (
        hisparse._resolve,
        "*i32 *i32 *i32 *i32 *i32 *i16 *i16 *i8 *i64 *i32 *i32 *i32 *i32 i32",
        {"K": 2048, "H": 4096, "BK": 2048, "BH": 4096, "PDL": True},
        16,
    ),
    (
        hisparse._gather,
        "*i32 *i32 *i32 *i32 *i32 *i64 i32 i32 i32",
        {"BLOCK_SIZE": 64, "WORDS": 288, "BC": 512, "UNWRITTEN": -POISON, "FETCHED": 3, "DEBUG": True},
        8,
    ),
    (hisparse._write_back, "*i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32", {"BLOCK_SIZE": 64, "WORDS": 288, "BW": 512}, 2),
]
"""Kernel, types of what it is given at run time, what it is compiled with, warps; all in the sizes of GLM-5.2."""


def main() -> None:
    for kernel, types, constants, warps in KERNELS:
        given = iter(types.split())
        names = [parameter.name for parameter in kernel.params]
        signature = {name: "constexpr" if name in constants else next(given) for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
        print(kernel.__name__, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
