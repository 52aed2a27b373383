"""Compiles the kernels for a Hopper card, which needs none: `python -m tests.engine.hisparse.compiled`.

In a process of its own: where the tests run without a GPU, kernels are Triton's interpreter's.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glm52_engine.kernels import hisparse, spread
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
        {
            "BLOCK_SIZE": 64,
            "WORDS": 288,
            "BC": 512,
            "UNWRITTEN": -POISON,
            "FETCHED": 3,
            "DEBUG": True,
            "FEW": 8,
            "MANY": 1 << 20,
        },
        8,
    ),
    (hisparse._copy_blocks, "*i64 *i32 *i32 i32 i32", {"CHUNKS": 1024, "BC": 512}, 8),
    (hisparse._write_back, "*i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32", {"BLOCK_SIZE": 64, "WORDS": 288, "BW": 512}, 2),
    (
        spread._decide,
        "*bf16 *fp32 *fp32 *i32 *bf16 *i32 *fp32 *i32 i32 i32 i32 i32 i32 fp32",
        {"TOP": 8, "BK": 8, "BE": 256, "BD": 8192, "NORM": True, "SPLITS": 8, "PDL": True},
        4,
    ),
    (
        spread._assign,
        "*i32 *fp32 *i32 *i32 *i32 *fp32 *i32 i32 i32 i32 i32 i32 i32",
        {"TOP": 8, "BK": 8, "BT": 1024, "SLOTS": 9, "PDL": True},
        8,
    ),
    (
        spread._add_up,
        "*bf16 *i32 *i32 *fp32 i32 i32 i32 i32 i32",
        {"TOP": 8, "BD": 2048, "PDL": True},
        4,
    ),
    (spread._sum_placed, "*bf16 *i64 *fp32 i32", {"TOP": 8, "BD": 2048, "PDL": True}, 4),
]
"""Kernel, types of what it is given at run time, what it is compiled with, warps; all in the sizes of GLM-5.2."""


def compiled(kernel: Any, types: str, constants: dict[str, Any], warps: int) -> Any:
    """As for tensors that begin at multiples of 16 bytes, which accesses of several elements a thread need."""
    given = iter(types.split())
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else next(given) for name in names}
    unaligned = getattr(kernel, "do_not_specialize_on_alignment", None) or ()
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(names)
        if signature[name].startswith("*") and name not in unaligned
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps})


_ACCESS = re.compile(r"tt\.(load|store) (%\w+)[ ,].* : (tensor<)?")
_POINTER = re.compile(r"(%\w+) = (?:tt\.addptr|tt\.splat|ttg\.convert_layout) (%\w+)")


def races(ttgir: str) -> list[str]:
    """Accesses of one tensor, at least one of which writes, with no barrier between them and by different threads.

    The compiler gives every access the threads that suit it. An access again by the same pointers is the same
    threads'; so are two of a single element, of which one thread does the writing.
    """
    roots: dict[str, str] = {}
    seen: list[tuple[str, str, str, bool]] = []
    found = []
    for line in ttgir.splitlines():
        # Of two branches one is taken, by all.
        if re.search(r"\b(gpu|ttg)\.barrier\b|} else {", line):
            seen.clear()
        elif made := _POINTER.search(line):
            roots[made[1]] = roots.get(made[2], made[2])
        elif access := _ACCESS.search(line):
            kind, pointer, several = access[1], access[2], access[3] is not None
            root = roots.get(pointer, pointer)
            for before, same, where, many in seen:
                if root == same and "store" in (kind, before) and pointer != where and (several or many):
                    found.append(f"{before} and {kind} of {root}")
            seen.append((kind, root, pointer, several))
    return found


def main() -> None:
    for kernel, types, constants, warps in KERNELS:
        made = compiled(kernel, types, constants, warps)
        print(kernel.__name__, len(made.asm["cubin"]), *races(made.asm["ttgir"]), sep="; ")


if __name__ == "__main__":
    main()
