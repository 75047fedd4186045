"""The linear layers of a 0.6B model with weights as checkpoints store them (AWQ and GPTQ in groups of 128, fp8) beside
our own int4 and int8: processor time of a layer's four GEMMs, in turn, the least of some rounds.

    python -m benchmarks.cpu.stored_rates [--rounds 9]

Groups of 128 with and without zero points are what AWQ and GPTQ checkpoints become (back/quant/kept.py). One thread,
whose own time is counted: what else runs on the machine disturbs it little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from headrace.back.layers.gemms import gemm_of
from headrace.back.quant.online import pack
from headrace.back.quant.scheme import ONLINE_SCHEMES

SHAPES = {"qkv": (1024, 4096), "o": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024)}
"""Inputs and outputs."""
BESIDE = {"int4-g128": "int4", "int4-asym-g128": "int4", "fp8": "int8", "fp8-block": "int8"}
"""What a checkpoint holds -> our own row."""
NAMES = {
    "int4-g128": "GPTQ",
    "int4-asym-g128": "AWQ, GPTQ with zero points",
    "fp8": "fp8",
    "fp8-block": "fp8 in blocks of 128 x 128",
}
ROWS = (1, 8, 32, 512)
COPIES = 3
"""Of each weight, read in turn: more than the caches hold."""


def layer_of(scheme: str, rows: int) -> Callable[[], None]:
    """A call of the four GEMMs."""
    calls = []
    for inputs, outputs in SHAPES.values():
        x_TI = torch.randn(rows, inputs).bfloat16()
        for _ in range(COPIES):
            weight = pack(
                torch.randn(outputs, inputs).bfloat16() / inputs**0.5, ONLINE_SCHEMES[scheme]
            )
            op, problem = gemm_of(weight, device="cpu", dtype=torch.bfloat16)
            calls.append((op.choose(problem).bind(weight, None), x_TI))

    def layer() -> None:
        for gemm, x_TI in calls:
            gemm(x_TI)

    return layer


def main() -> None:
    """Prints a row for each format and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(
        "| stored as | rows | ms of a layer | our own | ms | time beside it |\n|---|---|---|---|---|---|"
    )
    for rows in ROWS:
        layers = {name: layer_of(name, rows) for name in {*BESIDE, *BESIDE.values()}}
        least = dict.fromkeys(layers, float("inf"))
        for _ in range(rounds):
            for name, layer in layers.items():
                begin = time.process_time()
                layer()
                took = 1e3 * (time.process_time() - begin) / COPIES
                least[name] = min(least[name], took)
        for name, own in BESIDE.items():
            ratio = least[name] / least[own]
            print(
                f"| {NAMES[name]} | {rows} | {least[name]:.2f} | {own} | {least[own]:.2f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    main()
