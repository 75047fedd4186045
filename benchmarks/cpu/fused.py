"""Ops made in one beside the same ops one after the other, on the sizes of a 0.6B model: norm and quantization, a gate
inside the product, an output head that keeps its best results, alone and with the draw of rows with top_k.

    OMP_WAIT_POLICY=passive PYTHONPATH=. python benchmarks/cpu/fused.py --threads 2

The norm is timed with the product that follows it. Weights of the layers cycle, so that they come from memory; each way
has weights of its own, or one would find in the cache what the other has just read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from linear_blocks import cycled
from measure import cell, interleaved, row, setup

from headrace.back.kernels.fused_linear.op import FusedLinearProblem
from headrace.back.kernels.gated_act import native as gated_act
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.greedy import native as greedy
from headrace.back.kernels.linear import native as linear
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.linear_blocks import native as linear_blocks
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem
from headrace.back.kernels.linear_blocks.op import random_weight as random_blocks
from headrace.back.kernels.linear_quant import native as linear_quant
from headrace.back.kernels.linear_quant.op import LinearQuantProblem
from headrace.back.kernels.linear_quant.op import random_weight as random_codes
from headrace.back.kernels.linear_top import native as linear_top
from headrace.back.kernels.linear_top.op import NUM_CANDIDATES, LinearTopProblem
from headrace.back.kernels.native.library import NativeLibrary
from headrace.back.kernels.rms_norm.native import bind_add_norm_with
from headrace.back.kernels.rms_norm.op import RMSNormProblem
from headrace.back.kernels.rms_norm_quant.native import bind_with as bind_codes
from headrace.back.kernels.rms_norm_quant.op import RMSNormQuantProblem
from headrace.back.sampling.features import SampledRows
from headrace.back.sampling.sampler import Sampler
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart

WIDTH, QKV, INNER, VOCABULARY = 1024, 4096, 3072, 151_936
LAYERS = 28
NEW: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16, "inputs": WIDTH}
Pair = tuple[Callable[..., object], Callable[..., object]]


def product(kind: str, outputs: int, **more: Any) -> tuple[Any, Any, Any]:
    """The problem, a weight and the module of a product."""
    generator = torch.Generator().manual_seed(0)
    if kind == "bf16":
        weight = torch.randn(outputs, WIDTH, generator=generator).bfloat16()
        return LinearProblem(**NEW, outputs=outputs, **more), weight, linear
    if kind == "int8":
        quant = LinearQuantProblem(**NEW, outputs=outputs, **more)
        return quant, random_codes(quant, generator), linear_quant
    blocks = LinearBlocksProblem(**NEW, kinds=(("int4-g32", outputs),), **more)
    return blocks, random_blocks(blocks, generator), linear_blocks


def norm_codes(library: NativeLibrary, kind: str) -> Pair:
    """(separate, in one): add, norm, quantize and the product of query, key and value."""
    new = {"device": "cpu", "dtype": torch.bfloat16, "width": WIDTH, "eps": 1e-6}
    weight = torch.ones(WIDTH)
    norm = bind_add_norm_with(library, RMSNormProblem(**new), weight)
    group = None if kind == "int8" else 32
    quantized = bind_codes(library, RMSNormQuantProblem(**new, group=group), weight)
    made = [product(kind, QKV) for _ in range(2 * LAYERS)]
    plain = [native.bind_with(library, p, w, None) for p, w, native in made[::2]]
    codes = [
        native.bind_with(library, replace(p, quantized_rows=True), w, None)
        for p, w, native in made[1::2]
    ]
    whole, reads = cycled(plain, 0), cycled(codes, 0)
    return lambda x, r: whole(norm(x, r)), lambda x, r: reads(quantized(x, r))


def gate(library: NativeLibrary, kind: str) -> Pair:
    """(separate, in one): gate and up, and silu."""
    outputs = 2 * INNER
    weights = [product(kind, outputs)[1] for _ in range(2 * LAYERS)]
    plain = LinearProblem(**NEW, outputs=outputs)
    silu = GatedActProblem(device="cpu", dtype=torch.bfloat16, width=INNER, activation="silu")
    act = gated_act.bind_with(library, silu)
    asked = FusedLinearProblem(**NEW, outputs=outputs, activation="silu")
    whole = cycled([linear.bind_with(library, plain, w, None) for w in weights[::2]], 0)
    fused = cycled([linear.bind_gated(library, asked, w) for w in weights[1::2]], 0)
    return lambda x, r: act(whole(x)), lambda x, r: fused(x)


def head(library: NativeLibrary, kind: str) -> Pair:
    """(separate, in one): all logits and their greatest."""
    asked, weight, native = product(kind, VOCABULARY, wide=True)
    whole, best = native.bind_with(library, asked, weight, None), greedy.bind_with(library)
    top = linear_top.bind_with(library, LinearTopProblem(gemm=asked, count=1), weight)
    return lambda x, r: best(whole(x)), lambda x, r: top(x)


def drawn_head(library: NativeLibrary, kind: str) -> Pair:
    """(separate, in one): all logits, or the best TOPS, and the draw for top_k 20 and top_p 0.9."""
    asked, weight, native = product(kind, VOCABULARY, wide=True)
    whole = native.bind_with(library, asked, weight, None)
    best = linear_top.bind_with(library, LinearTopProblem(gemm=asked, count=NUM_CANDIDATES), weight)
    sampler = Sampler(max_rows=32, logits_width=VOCABULARY, device=torch.device("cpu"))
    for at in range(32):
        sampling = RowSampling(seed=at, top_k=20, top_p=0.9)
        tokens = np.zeros(1, np.int32)
        sampler.start(
            RowStart(row=at, request=at, tokens=tokens, num_prompt=1, num_computed=0, sampling=sampling)
        )  # fmt: skip
    tokens_MC = torch.zeros(32, 1, dtype=torch.int32)

    def rows(x: torch.Tensor) -> SampledRows:
        index = np.arange(len(x))
        return {"rows": index, "positions": index + 5, "tokens": tokens_MC}

    def separate(x: torch.Tensor, r: torch.Tensor) -> object:
        logits = whole(x)
        return sampler.sample(logits, sampler.greedy(logits), **rows(x))

    def fused(x: torch.Tensor, r: torch.Tensor) -> object:
        return sampler.sample_candidates(best(x), lambda at: whole(x[at]), **rows(x))

    return separate, fused


CASES = (
    ("norm to codes, qkv", norm_codes, ("int8", "int4"), (1, 8, 32, 512)),
    ("gate", gate, ("bf16",), (1, 8, 32, 512)),
    ("head, greedy", head, ("bf16", "int8", "int4"), (1, 8, 32)),
    ("head, top_k", drawn_head, ("bf16", "int8", "int4"), (1, 8, 32)),
)


def main() -> None:
    library, arguments = setup(__doc__)
    row("ops", "weights", "rows", "separate us", "in one us", "saved (minima)")
    row(*["---"] * 6)
    for name, make, kinds, sizes in CASES:
        if arguments.only not in name:
            continue
        for kind in kinds:
            separate, fused = make(library, kind)
            for rows in sizes:
                x, residual = (torch.randn(rows, WIDTH).bfloat16() for _ in range(2))
                calls = {
                    "separate": partial(separate, x, residual),
                    "fused": partial(fused, x, residual),
                }
                taken = interleaved(calls, seconds=arguments.seconds)
                saved = 1 - taken["fused"][1] / taken["separate"][1]
                row(name, kind, rows, cell(taken["separate"]), cell(taken["fused"]), f"{saved:.1%}")


if __name__ == "__main__":
    main()
