"""Compiles every Triton kernel for GPUs that are not there: `python -m tests.kernels.triton.cross_compile TARGET
...`.

A target is "cuda:90" or "hip:gfx942". Each kernel is bound and called as in use, on CPU tensors; what would have been
launched is compiled instead, with the types and alignments the launch would have seen. Prints one JSON object per
kernel and target; with --code first, the file its machine code was put into as well. Runs in a process of its own: a
process either interprets Triton kernels or compiles them, and a crash of the compiler is one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, mangle_type

from headrace.back.kernels.triton.room import Pretended
from headrace.back.kernels.triton.wrap import pairs_compile
from tests.kernels.triton.cases import CASES, serves

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
WAVE = {"gfx942": 64, "gfx950": 64}


def target_of(name: str) -> GPUTarget:
    """The compiler's target of "backend:architecture"."""
    backend, arch = name.split(":")
    return (
        GPUTarget("cuda", int(arch), 32)
        if backend == "cuda"
        else GPUTarget("hip", arch, WAVE.get(arch, 32))
    )


def source(function: JITFunction, values: dict[str, Any]) -> ASTSource:
    """The source as a launch with these arguments specialises it."""
    signature, constants, attributes = {}, {}, {}
    constexprs = {p.name for p in function.params if p.is_constexpr}
    for index, name in enumerate(function.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = mangle_type(value)
        elif name in constexprs or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif type(value) is int:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    make = GluonASTSource if function.is_gluon() else ASTSource
    return make(fn=function, signature=signature, constexprs=constants, attrs=attributes)


def launches(
    call: Callable[[], object],
) -> list[tuple[JITFunction, dict[str, Any], dict[str, Any]]]:
    """What `call` launches: function, arguments by name, options."""
    found: list[tuple[JITFunction, dict[str, Any], dict[str, Any]]] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in self.arg_names}
        found.append((self, values, options))

    kept, JITFunction.run = JITFunction.run, run
    try:
        call()
    finally:
        JITFunction.run = kept
    return found


def compiled(names: list[str], only: str = "") -> Iterator[dict[str, Any]]:
    """Compiles every case for the targets."""
    for title, call in CASES:
        if only not in title:
            continue
        for name in filter(partial(serves, title), names):
            Pretended.target = name
            target = target_of(name)
            for function, values, options in launches(call):
                began = time.perf_counter()
                if "DEPENDENT" in values:
                    dependent = target.backend == "cuda" and target.arch >= 90
                    values["DEPENDENT"] = dependent
                    if "BITS" in values:
                        values["BITS"] = bool(dependent and values["QUANTIZED"]) and pairs_compile(
                            target.arch // 10
                        )
                if "TRAP" in values:
                    values["TRAP"] = target.backend == "cuda"
                options.pop("launch_pdl", None)
                binary = triton.compile(source(function, values), target=target, options=options)
                assembly = binary.asm["ptx" if target.backend == "cuda" else "amdgcn"]
                yield {
                    "case": title,
                    "kernel": function.fn.__name__,
                    "target": name,
                    "shared": binary.metadata.shared,
                    "assembly": assembly,
                    "binary": binary.asm.get("cubin"),
                    "seconds": round(time.perf_counter() - began, 2),
                }


def main() -> None:
    """Prints what was compiled, without the assembly, but with the matrix instructions found in it."""
    marks = ("wgmma", "mma.sync", "tcgen05.mma", "v_mfma", "v_wmma", "cp.async", "griddepcontrol")
    only, targets = ("", [word for word in sys.argv[1:] if word != "--code"])
    if ":" not in targets[0]:
        only, targets = targets[0], targets[1:]
    for one in compiled(targets, only):
        assembly, binary = one.pop("assembly"), one.pop("binary")
        if "--code" in sys.argv:
            with tempfile.NamedTemporaryFile(dir=knobs.cache.dir, delete=False) as file:
                file.write(binary)
            one["code"] = file.name
        one["found"] = [mark for mark in marks if mark in assembly]
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
