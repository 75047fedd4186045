"""The weight gemms of one decode step of a 0.6B model (benchmarks/models/qwen3-0.6b), beside plain reading.

    PYTHONPATH=. python benchmarks/cpu/gemms.py --threads 2 [--precisions int8,int4] [--rows 1,8,32]

Every gemm of all layers runs once per round, in the order of the model: nothing is found in a cache. Cells
are milliseconds of a step, medians over rounds; `read` is a plain read of the packed bytes by the same threads
in the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from headrace.back.kernels.linear import native as plain
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.linear_blocks import native as blocks
from headrace.back.kernels.linear_blocks.layout import LAYOUTS, BlockWeight, empty_segment
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem
from headrace.back.kernels.linear_quant import native as quant
from headrace.back.kernels.linear_quant.layout import empty
from headrace.back.kernels.linear_quant.op import LinearQuantProblem
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.probe.native import reader
from headrace.back.parallel.bundle import FP8, INT8
from headrace.back.platforms import huge_pages
from headrace.back.quant.online import layout_of
from headrace.back.quant.scheme import SCHEMES

LAYERS = 28
SHAPES = {"qkv": (1024, 4096), "o": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024)}
HEAD = (1024, 151936)


def weight(library, precision, inputs, outputs):
    """(gemm, tensor of its bytes) with a weight of its own: "bf16", a scheme of back/quant or a block layout."""
    facts = {"device": "cpu", "dtype": torch.bfloat16, "inputs": inputs}
    if precision == "bf16":
        data = huge_pages.kept((outputs, inputs), torch.bfloat16).fill_(0.01)
        return plain.bind_with(library, LinearProblem(**facts, outputs=outputs), data, None), data
    scheme = SCHEMES.get(precision)
    layout = LAYOUTS[precision] if scheme is None else layout_of(scheme)
    if layout is None:
        packed = empty(outputs, inputs, FP8 if scheme.floating else INT8)
        packed.panels.fill_(60)
        problem = LinearQuantProblem(**facts, outputs=outputs, form=packed.form)
        return quant.bind_with(library, problem, packed, None), packed.panels
    segment = empty_segment(layout, outputs, inputs)
    segment.panels.fill_(60)
    asked = LinearBlocksProblem(**facts, kinds=((layout.name, outputs),))
    return blocks.bind_with(library, asked, BlockWeight(inputs, (segment,)), None), segment.panels


def step(library, precision):
    """(name, inputs, gemm, bytes) of every gemm of a step."""
    shapes = [(name, *shape) for _ in range(LAYERS) for name, shape in SHAPES.items()] + [
        ("head", *HEAD)
    ]
    return [
        (name, inputs, *weight(library, precision, inputs, outputs))
        for name, inputs, outputs in shapes
    ]


def measure(gemms, rows, seconds, read):
    """name -> median milliseconds of a step; `read` reads each weight just after all gemms ran."""
    x = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs, _, _ in gemms}
    taken: dict[str, list[float]] = {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken["all"]) < 4:
        spent: dict[str, float] = {}
        for name, inputs, gemm, _ in gemms:
            start = time.perf_counter()
            gemm(x[inputs])
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
        spent["all"] = sum(spent.values())
        start = time.perf_counter()
        for one in read:
            one()
        spent["read"] = time.perf_counter() - start
        for name, s in spent.items():
            taken.setdefault(name, []).append(s * 1e3)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def alone(library, precision, rows, seconds):
    """Shape -> microseconds of one gemm on one thread, by that thread's own clock: what a busy machine leaves
    of a figure; the 10th percentile."""
    taken = {}
    for name, (inputs, outputs) in SHAPES.items():
        count = -(-(96 << 20) // (inputs * outputs // 2))
        made = [weight(library, precision, inputs, outputs) for _ in range(count)]
        x, times, end = torch.randn(rows, inputs).bfloat16(), [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 2 * count:
            for gemm, _ in made:
                start = time.thread_time()
                gemm(x)
                times.append((time.thread_time() - start) * 1e6)
        taken[name] = sorted(times)[len(times) // 10]
    return taken


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row of the table")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument(
        "--alone", action="store_true", help="single gemms, one thread, its own time"
    )
    own = parser.parse_args()
    library = load()
    assert isinstance(library, NativeLibrary), library
    torch.set_num_threads(1)
    library.set_threads(own.threads)
    if own.alone:
        library.set_threads(1)
        print("| precision | rows | " + " | ".join(f"{name} us" for name in SHAPES) + " |")
        print("| --- " * (len(SHAPES) + 2) + "|")
        for precision in own.precisions.split(","):
            for rows in map(int, own.rows.split(",")):
                times = alone(library, precision, rows, own.seconds).values()
                print(
                    f"| {precision} | {rows} | " + " | ".join(f"{us:,.0f}" for us in times) + " |",
                    flush=True,
                )
        return
    names = [*SHAPES, "head", "all", "read"]
    print(f"instruction set {library.isa}, {own.threads} threads")
    print("| precision | rows | " + " | ".join(names) + " | GB | GB/s | share of reading |")
    print("| --- " * (len(names) + 5) + "|")
    for precision in own.precisions.split(","):
        gemms = step(library, precision)
        num_bytes = sum(data.nbytes for *_, data in gemms)
        read = [reader(library, data) for *_, data in gemms]
        for rows in map(int, own.rows.split(",")):
            spent = measure(gemms, rows, own.seconds, read)
            cells = " | ".join(f"{spent[name]:.2f}" for name in names)
            print(f"| {precision} | {rows} | {cells} | {num_bytes / 1e9:.3f} | {num_bytes / spent['all'] / 1e6:.1f} "
                  f"| {spent['read'] / spent['all']:.0%} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
