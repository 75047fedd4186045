"""Products with block-quantized weights (GGUF types): beside the int8 and int4 of `--quantization`, and plain reading.

Each shape cycles through enough weights to leave the caches, as the layers of a model do.
"""

from __future__ import annotations

from functools import partial

import torch
from linear import WEIGHT_BYTES, cycle
from measure import interleaved, row, setup

from headrace.back.kernels.linear_blocks import native as blocks
from headrace.back.kernels.linear_blocks.layout import CODINGS
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem
from headrace.back.kernels.linear_blocks.op import random_weight as random_blocks
from headrace.back.kernels.linear_quant import native as quant
from headrace.back.kernels.linear_quant.op import LinearQuantProblem, random_weight
from headrace.back.kernels.probe.native import reader

SHAPES = ((1024, 4096), (3072, 1024))  # inputs, outputs
ROWS = (1, 4, 16, 64)
BESIDE = {"Q8_0": 8, "Q4_0": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 8, "IQ4_XS": 4}


def main() -> None:
    library, arguments = setup(__doc__)
    row(
        "type",
        "inputs x outputs",
        "rows",
        "blocks us",
        "int us",
        "beside",
        "blocks / int",
        "read us",
    )
    row(*["---"] * 8)
    dtype, generator = torch.bfloat16, torch.Generator().manual_seed(0)
    for name, bits in BESIDE.items():
        for inputs, outputs in SHAPES:
            size = CODINGS[name].packed_bytes(outputs, inputs)
            new = {"device": "cpu", "dtype": dtype, "inputs": inputs}
            ours = LinearBlocksProblem(**new, kinds=((name, outputs),))
            theirs = LinearQuantProblem(**new, bits=bits, outputs=outputs)
            count = -(-WEIGHT_BYTES // size)
            one, other = random_blocks(ours, generator), random_weight(theirs, generator)
            panels = one.segments[0].panels
            copies = [type(one)(inputs, (type(one.segments[0])(CODINGS[name], outputs, panels.clone()),))
                      for _ in range(count)]  # fmt: skip
            packed = [
                type(other)(bits, outputs, inputs, other.panels.clone()) for _ in range(count)
            ]
            calls = {
                "blocks": cycle(lambda p, w: blocks.bind_with(library, p, w, None), ours, copies, 0),
                "int": cycle(lambda p, w: quant.bind_with(library, p, w, None), theirs, packed, 1),
                "read": cycle(
                    lambda p, w: lambda x, read=reader(library, w.segments[0].panels): read(),
                    ours, copies, 2,
                ),
            }  # fmt: skip
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                timed = interleaved(
                    {n: partial(call, x) for n, call in calls.items()},
                    seconds=arguments.seconds,
                )
                best = {n: low for n, (_, low) in timed.items()}
                row(name, f"{inputs} x {outputs}", rows, f"{best['blocks']:,.0f}", f"{best['int']:,.0f}",
                    f"int{bits}", f"{best['blocks'] / best['int']:.2f}", f"{best['read']:,.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
