"""The kernels without Python: on an emulated Arm CPU (PLT-12, PLT-13), under valgrind, and with the instruction set
capped."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.back.kernels.native import build
from headrace.back.kernels.native.library import NativeLibrary
from tests.kernels.native.conftest import EVERY_ISA
from tests.kernels.native.programs import build_library, build_program

ARM = "aarch64-linux-gnu-g++"
ARMS = ("portable", "armdot", "armbf16")
# Instructions of one call, AVX2: products of 1 row, 512 outputs, 1024 inputs (a number is a block layout); attention of
# 4 heads over 512 tokens. Measured; a kernel may get better, but not worse unnoticed.
MEASURED = {
    "linear": 266_143,
    "linear_fp8": 510_125,
    "linear_gated": 272_481,
    "linear_quant": 153_056,
    "linear_top": 268_979,
    "rms_norm_quantized": 23_134,
    "0": 210_243,  # Q8_0
    "1": 146_353,  # Q4_0
    "7": 174_901,  # Q4_K
    "9": 248_024,  # Q6_K
    "attention": 270_349,
    "attention_int8": 414_675,
    "attention_fp8": 516_465,
}
SLACK = 1.05
NUM_CHECKS = 45  # lines that the program prints


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program(build.find_compiler(), tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_every_instruction_set_agrees_with_plain_loops(
    library_path: Path, program: Path, isa: str
) -> None:
    if isa not in NativeLibrary(library_path).isas or isa == "amx":
        pytest.skip(f"this CPU does not run {isa}, or it has no kernels of its own here")
    done = subprocess.run([program, library_path, isa], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n") == NUM_CHECKS


@pytest.mark.slow
@pytest.mark.timeout(900)  # the compiler takes most of it
@pytest.mark.parametrize("name", ARMS)
def test_arm_kernels_agree_with_plain_loops_under_emulation(tmp_path: Path, name: str) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if shutil.which(ARM) is None or emulator is None:
        pytest.skip(f"needs {ARM} and qemu-aarch64 (g++-aarch64-linux-gnu, qemu-user)")
    isa = next(isa for isa in build.ISAS if isa.name == name)
    library = build_library(ARM, isa, tmp_path, "-O3")
    program = build_program(ARM, tmp_path)
    command = [emulator, "-L", "/usr/aarch64-linux-gnu", "-cpu", "max", program, library, name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == NUM_CHECKS


def instructions(program: Path, library: Path, kernel: str, folder: Path) -> int:
    """Instructions inside the kernel's exported function and what it calls, by callgrind."""
    name = kernel if kernel.startswith(("linear", "rms")) else kernel.partition("_")[0]
    name = "linear_blocks" if kernel.isdecimal() else name
    command = [
        "valgrind", "--tool=callgrind", f"--toggle-collect=hr_{name}_avx2",
        f"--callgrind-out-file={folder / 'out'}", program, library, "avx2", kernel,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(MEASURED))
def test_hot_kernels_take_no_more_instructions_than_measured(
    complete_path: Path, program: Path, tmp_path: Path, kernel: str
) -> None:
    """valgrind knows no AVX-512, so AVX2 stands for all: the loops are the same text."""
    if shutil.which("valgrind") is None:
        pytest.skip("needs valgrind")
    if "avx2" not in NativeLibrary(complete_path).isas:
        pytest.skip("this CPU does not run avx2")
    assert instructions(program, complete_path, kernel, tmp_path) <= MEASURED[kernel] * SLACK
