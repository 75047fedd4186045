"""GEMMs of quantized weights alone, beside our own of bfloat16, on one GPU.

    python -m benchmarks.h200.quantized_gemms --out gemms.json [--seconds 60] [--parts int4,fp8,grouped,mxfp8,gates]

fp8: tokens that are e4m3 already, by what serves many of them, with a scale a token and an output, and in blocks;
TFLOP/s; "layer": with the pass that quantizes the tokens. grouped: 8 experts of 4,096 tokens each, weights in blocks
(4,096 of 7,168 inputs, 7,168 of 2,048), by the streaming kernel and by tiles. int4: 14,336 outputs of 4,096 inputs,
groups of 128, microseconds at 1 and 16 tokens and how many times as quick as bfloat16. mxfp8: the four layers of a
decoder layer of Qwen3-8B together, microseconds, by tiles of e4m3 tokens and dequantized before the library's GEMM,
beside bfloat16. gates: the second layer of its MLP from gates and ups on, with the activation, the tokens' numbers and
the GEMM each on its own, and with the first two in one pass. It ends within its seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.h200.mixtures import inputs_of
from benchmarks.h200.shapes import device_name
from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.kernels.experts.triton_dispatch import dispatched
from headrace.back.kernels.experts_fp8 import op as experts
from headrace.back.kernels.experts_fp8 import triton_experts_fp8
from headrace.back.kernels.experts_fp8.layout import GROUP
from headrace.back.kernels.fused_linear import op as plain
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.linear import triton_scaled_rows
from headrace.back.kernels.linear.scaled_rows import ScaledRows
from headrace.back.kernels.linear_fp8 import op as fp8
from headrace.back.kernels.linear_fp8 import triton_linear_fp8
from headrace.back.kernels.linear_fp8.layout import quantize_rows
from headrace.back.kernels.linear_int4 import op as int4
from headrace.back.kernels.op import sample_generator
from headrace.back.kernels.triton.timing import copies, each_us

NEW: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
SHAPES = ((8192, 8192, 8192), (4096, 4096, 7168), (16384, 24576, 4096))
"""Tokens, outputs, inputs."""
MIXTURE = ExpertsProblem(**NEW, experts=8, slots=1, width=7168, inner=2048)
EXPERT_TOKENS = 4096
OUTPUTS, INPUTS = 14336, 4096
LAYERS = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
"""Outputs and inputs of a decoder layer of Qwen3-8B."""
MXFP8_TOKENS = (65, 128, 256, 512, 1024, 2048, 4096, 8192)
GATE_TOKENS = (128, 1024, 8192, 16384)


def fp8_rows() -> Iterator[dict[str, Any]]:
    """Many tokens by e4m3 weights."""
    for tokens, outputs, inputs in SHAPES:
        for group in (None, 128):
            problem = fp8.LinearFp8Problem(**NEW, outputs=outputs, inputs=inputs, group=group)
            weight = fp8.random_weight(problem, sample_generator(problem.device))
            x_TI = torch.randn(tokens, inputs, **NEW)
            rows = quantize_rows(x_TI, group)
            rate = 2e-6 * tokens * outputs * inputs
            product = triton_linear_fp8._product(problem, weight, None)
            layer = triton_linear_fp8.bind(problem, weight, None)
            yield {
                "gemm": "e4m3, blocks" if group else "e4m3",
                "shape": (tokens, outputs, inputs),
                "by": triton_linear_fp8.library_refusal(problem) or "library",
                "TFLOP/s": round(rate / each_us([partial(product, rows)] * 3)),
                "layer TFLOP/s": round(rate / each_us([partial(layer, x_TI)] * 3)),
            }


def mxfp8_rows() -> Iterator[dict[str, Any]]:
    """32 inputs a scale, by both ways, and bfloat16."""
    layers = []
    for outputs, inputs in LAYERS:
        problem = fp8.LinearFp8Problem(**NEW, outputs=outputs, inputs=inputs, group=32)
        weight = fp8.random_weight(problem, sample_generator(problem.device))
        quantize = triton_scaled_rows.bind(inputs, 32, norm_weight_I=None, eps=0.0)
        plain_OI = torch.randn(outputs, inputs, **NEW)
        product = triton_linear_fp8._product(problem, weight, None)
        dequantized = triton_linear_fp8._dequantized(problem, weight, None)
        layers.append(
            {
                "tiles": lambda x, product=product, quantize=quantize: product(quantize(x)),
                "dequantized": lambda x, run=dequantized: run(x, None),
                "bf16": lambda x, plain_OI=plain_OI: F.linear(x, plain_OI),
            }
        )
    for tokens in MXFP8_TOKENS:
        row: dict[str, Any] = {"gemm": "mxfp8, four layers of 8B", "tokens": tokens}
        for way in layers[0]:
            us = 0.0
            for layer, (_, inputs) in zip(layers, LAYERS, strict=True):
                x = torch.randn(tokens, inputs, **NEW)
                us += each_us([partial(layer[way], x)] * 3)
            row[f"{way} us"] = round(us, 1)
        yield row


def gates() -> Iterator[dict[str, Any]]:
    """From gates and ups to the residual, in two passes before the GEMM and in one."""
    outputs, inputs = LAYERS[-1]
    for group in (None, 128):
        problem = fp8.LinearFp8Problem(
            **NEW, outputs=outputs, inputs=inputs, group=group, add=True, gated="silu"
        )
        weight = fp8.random_weight(problem, sample_generator(problem.device))
        together = triton_linear_fp8.bind(problem, weight, None)
        alone = triton_linear_fp8.bind(replace(problem, gated=None), weight, None)
        activate = triton_gated_act.bind(fp8.gates_before(problem))

        def apart(
            x_T2I: torch.Tensor, residual: torch.Tensor, alone: Any = alone, act: Any = activate
        ) -> object:
            return alone(act(x_T2I), residual)

        for tokens in GATE_TOKENS:
            x_T2I = torch.randn(tokens, 2 * inputs, **NEW)
            residual = torch.randn(tokens, outputs, **NEW)
            rows = quantize_rows(x_T2I[:, :inputs], group)
            product = triton_linear_fp8._product(problem, weight, None)
            us = {
                "apart": each_us([partial(apart, x_T2I, residual)] * 3),
                "together": each_us([partial(together, x_T2I, residual)] * 3),
                "GEMM alone": each_us([partial(product, rows)] * 3),
            }
            rate = 2e-6 * tokens * outputs * inputs
            yield {
                "gemm": "behind gates, " + ("e4m3, blocks" if group else "e4m3"),
                "tokens": tokens,
                **{f"{way} us": round(one, 1) for way, one in us.items()},
                **{f"{way} TFLOP/s": round(rate / one) for way, one in us.items()},
            }


def grouped() -> Iterator[dict[str, Any]]:
    """Both GEMMs of a mixture over rows that are sorted already."""
    problem = experts.ExpertsFp8Problem(mixture=MIXTURE, group=GROUP)
    weights = experts.random_experts(problem, sample_generator(MIXTURE.device))
    num_tokens = EXPERT_TOKENS * MIXTURE.experts
    x_TE, expert_TK, _ = inputs_of(MIXTURE, num_tokens, 1)
    streamed = triton_experts_fp8.streams(problem)
    ways = [("stream", m) for m in (64, 128) if streamed] + [("tiles", 128)]
    for regime, m in ways:
        found = dispatched(x_TE, expert_TK, experts=MIXTURE.experts, m=m, group=GROUP)
        assert found.scales_NG is not None
        rows = ScaledRows(found.rows_NE, found.scales_NG)
        multiply = triton_experts_fp8._multiply_of(regime)
        up = partial(multiply, MIXTURE, rows, weights.up, None, found.tiles, m=m, is_gated=True)
        row: dict[str, Any] = {"gemm": "grouped e4m3, blocks", "by": f"{regime}, {m} rows"}
        try:
            inner = ScaledRows(*up())
            down = partial(
                multiply, MIXTURE, inner, weights.down, None, found.tiles, m=m, is_gated=False
            )
            flops = 2e-6 * num_tokens * MIXTURE.width * MIXTURE.inner
            row["up TFLOP/s"] = round(2 * flops / each_us([up] * 3))
            row["down TFLOP/s"] = round(flops / each_us([down] * 3))
        except Exception as failure:  # a tile that does not fit says so
            row["failed"] = f"{type(failure).__name__}: {failure}"[:200]
        yield row


def calls(bind: Callable[[], Callable[..., object]], num_bytes: int, x: torch.Tensor) -> float:
    """Microseconds of a call over weights that no cache holds."""
    return each_us([partial(bind(), x, None) for _ in range(copies(num_bytes))])


def int4_rows() -> Iterator[dict[str, Any]]:
    """Few tokens by 4-bit weights, beside bfloat16."""
    problem = int4.LinearInt4Problem(**NEW, outputs=OUTPUTS, inputs=INPUTS, group=128)
    floats = plain.FusedLinearProblem(**NEW, outputs=OUTPUTS, inputs=INPUTS)
    kernel, own = int4.OP.choose(problem), plain.OP.choose(floats)
    generator = sample_generator(problem.device)
    weight = int4.sample_of(problem, (1,)).weights[0]
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=generator, **NEW) / INPUTS**0.5

    def packed() -> Callable[..., object]:
        fresh = replace(weight, words_NBW=weight.words_NBW.clone())
        return kernel.bind(fresh, None, None)

    def whole() -> Callable[..., object]:
        return own.bind(weight_OI.clone(), None, None)

    for tokens in (1, 8, 16, 32, 64):
        x = torch.randn(tokens, INPUTS, **NEW)
        ours = calls(packed, weight.num_bytes, x)
        bf16 = calls(whole, weight_OI.nbytes, x)
        yield {
            "gemm": f"int4-g128, {OUTPUTS} of {INPUTS}, {tokens} tokens",
            "us": round(ours, 2),
            "bf16 us": round(bf16, 2),
            "ratio": round(bf16 / ours, 2),
            "bf16 by": own.kernel.name,
        }


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "int4": int4_rows,
    "fp8": fp8_rows,
    "grouped": grouped,
    "mxfp8": mxfp8_rows,
    "gates": gates,
}


def main() -> None:
    """Prints and keeps a row for each GEMM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    rows: list[dict[str, Any]] = []
    for part in (PARTS[name] for name in given.parts.split(",")):
        try:
            for row in part():
                rows.append(row)
                print(json.dumps(row), flush=True)
                if time.monotonic() > until:
                    break
        except Exception as failure:  # the other parts are wanted all the same
            print(part.__name__, type(failure).__name__, str(failure)[:300], flush=True)
    if given.out:
        given.out.write_text(json.dumps({"versions": device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
