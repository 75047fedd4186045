"""Builds `program/kernel_check.cpp` and, for another machine, a library of the kernels it calls."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.back.kernels.native import build

SOURCE = Path(__file__).parent / "program" / "kernel_check.cpp"
CHECKED = (
    *("linear", "linear_fp8", "linear_quant", "quantize"),
    *("linear_blocks", "pack_blocks", "embedding_blocks"),
    *("attention", "kv_write"),
)


def build_program(compiler: str, folder: Path) -> Path:
    """The check program for the compiler's machine."""
    path = folder / "kernel_check"
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-Werror", str(SOURCE), "-ldl"]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path


def build_library(compiler: str, isa: build.Isa, folder: Path, level: str) -> Path:
    """The checked kernels in one instruction set, and the pool; `level`: of optimization."""
    flags = [*build._FLAGS, level, *isa.flags, f"-DHR_ISA={isa.name}", "-DHR_DIGEST=none"]
    names = [path for path in build.sources() if path.suffix == ".cpp"]
    units = [
        path
        for path in names
        if not path.name.startswith("native_") or path.stem.removeprefix("native_") in CHECKED
    ]

    def compiled(path: Path) -> str:
        out = folder / f"{path.stem}_{isa.name}.o"
        subprocess.run([compiler, *flags, "-c", str(path), "-o", str(out)], check=True)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / f"libcheck_{isa.name}.so"
    subprocess.run([compiler, "-shared", "-pthread", *objects, "-o", str(library)], check=True)
    return library
