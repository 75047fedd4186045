"""What quantizing costs while a checkpoint loads: microseconds for a weight of 3072 x 1024, by scheme.

python benchmarks/cpu/quantize.py [--threads 1]
"""

from __future__ import annotations

import torch
from measure import cell, interleaved, row, setup

from headrace.back.quant.online import pack
from headrace.back.quant.scheme import SCHEMES

OUTPUTS, INPUTS = 3072, 1024


def main() -> None:
    _, arguments = setup(__doc__)
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    taken = interleaved(
        {name: lambda scheme=scheme: pack(weight, scheme) for name, scheme in SCHEMES.items()},
        seconds=arguments.seconds,
    )
    row("scheme", "us for 3.1 million weights", "weights per ns")
    row(*["---"] * 3)
    for name, times in taken.items():
        row(name, cell(times), f"{OUTPUTS * INPUTS / min(times) / 1e3:.2f}")


if __name__ == "__main__":
    main()
