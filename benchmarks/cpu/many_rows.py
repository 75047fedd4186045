"""Many rows by int8 weights: nanoseconds of a matrix tile's product (16 rows by 64 inputs by 16 outputs).

    PYTHONPATH=. python benchmarks/cpu/many_rows.py [--threads 2] [--beside LIBRARY] [--only qkv,down] [--seconds 1]

Rows are codes already, weights are read in turn. `--beside`: the library of another checkout, called in turn with ours
(before / after); where their results differ in a bit, that is an error. Minima: another guest of the host that uses the
same core's tiles slows them threefold, for seconds. Of one thread its own time.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import torch
from measure import row

from headrace.back.kernels.gated_act.native import ACTIVATIONS
from headrace.back.kernels.linear_quant import native, op
from headrace.back.kernels.linear_quant.rows import quantize_rows
from headrace.back.kernels.native.library import DTYPES, NativeLibrary, load

# inputs, outputs of the 0.6B shape and of the bundled model; gate_up with its activation
SHAPES = {
    "qkv": (1024, 4096), "o": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024),
    "qkv bundled": (384, 768), "o bundled": (512, 384), "gate_up bundled": (384, 1280),
    "down bundled": (640, 384),
}  # fmt: skip
ROWS = (64, 128, 512, 2048)
WEIGHTS_BYTES = 24 << 20


def kernels(library: NativeLibrary, beside: str, threads: int):
    """The exported function of our library, and of another one."""
    paths = [str(library.path), *([str(Path(beside).resolve())] if beside else [])]
    found = []
    for path in paths:
        dll = ctypes.CDLL(path)
        dll.hr_cpu_isas()  # asks the system for the tiles
        dll.hr_pool_resize(threads, None)
        kernel = getattr(dll, f"hr_linear_quant_int8_rows_{library.isa}")
        kernel.argtypes, kernel.restype = native._QUANTIZED_ARGUMENTS, ctypes.c_int32
        found.append(kernel)
    return found


def measure(calls, name, rows, seconds, clock):
    """Nanoseconds of a tile's product, per kernel."""
    inputs, outputs = SHAPES[name]
    activation = "silu" if name.startswith("gate") else None
    problem = op.LinearQuantProblem(
        device="cpu", dtype=torch.bfloat16, inputs=inputs, outputs=outputs, activation=activation
    )
    count = max(2, min(8, WEIGHTS_BYTES // (inputs * outputs)))
    weights = [op.random_weight(problem, torch.Generator().manual_seed(i)) for i in range(count)]
    padded = torch.empty(
        rows, -(-inputs // 64) * 64 + 64, dtype=torch.int8
    )  # as a norm leaves them
    codes, scales, sums = quantize_rows(torch.randn(rows, inputs).bfloat16(), None)
    padded[:, : codes.shape[1]] = codes
    results = [torch.empty(rows, problem.results, dtype=torch.bfloat16) for _ in calls]
    number = -1 if activation is None else ACTIVATIONS[activation]
    best, turn, end = [float("inf")] * len(calls), 0, time.perf_counter() + seconds
    while time.perf_counter() < end or turn < 4 * count:
        panels = weights[turn // 2 % count].panels
        for i, call in enumerate(calls):
            start = clock()
            status = call(
                padded.data_ptr(), scales.data_ptr(), sums.data_ptr(), panels.data_ptr(), None,
                results[i].data_ptr(), rows, outputs, inputs, padded.stride(0), problem.results,
                number, DTYPES[torch.bfloat16],
            )  # fmt: skip
            best[i] = min(best[i], clock() - start)
            assert status == 0, status
        assert all(torch.equal(one, results[0]) for one in results[1:]), (name, rows)
        turn += 1
    tiles = -(-rows // 16) * (outputs // 16) * -(-inputs // 64)
    return [s / tiles * 1e9 for s in best]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", default="", help="the library of another checkout")
    parser.add_argument("--only", default="", help="shapes, by commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell")
    given = parser.parse_args()
    library = load()
    assert isinstance(library, NativeLibrary), library
    torch.set_num_threads(1)
    calls = kernels(library, given.beside, given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    row("inputs x outputs", *(f"{rows} rows" for rows in ROWS))
    row(*["---"] * (1 + len(ROWS)))
    for name in given.only.split(",") if given.only else SHAPES:
        taken = [reversed(measure(calls, name, rows, given.seconds, clock)) for rows in ROWS]
        inputs, outputs = SHAPES[name]
        row(
            f"{inputs} x {outputs} ({name})",
            *(" / ".join(f"{ns:.1f}" for ns in cell) for cell in taken),
        )


if __name__ == "__main__":
    main()
