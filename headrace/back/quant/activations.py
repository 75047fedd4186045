"""What becomes of the inputs of GEMMs with quantized weights, beside what a checkpoint asks: told
before anything runs."""

from __future__ import annotations

import torch

from headrace.back.kernels.experts_fp8.layout import GROUP
from headrace.back.kernels.experts_fp8.op import QUANTIZED_FROM
from headrace.back.kernels.linear_fp8.op import LinearFp8Problem
from headrace.back.kernels.linear_int4.op import INT8_FROM
from headrace.back.kernels.linear_int8.op import STREAMED_TOKENS
from headrace.back.quant.gpu import GPU_SCHEMES
from headrace.back.quant.kept import INT8_ROWS, MICROSCALED, PANEL_SCHEMES, STORED_SCALE, bare

AS_THEY_ARE = "as they are"


def inputs_of(scheme: str, device: str, *, routed: bool = False) -> str:
    """How inputs of a weight that is kept in a scheme are multiplied on a kind of device; `routed`:
    of experts."""
    if device == "cuda":
        return _of_experts(scheme) if routed else _on_gpu(scheme)
    held = PANEL_SCHEMES.get(bare(scheme))
    if held is None or (held.floating and held.bits == 8):
        return AS_THEY_ARE
    if scheme.endswith(STORED_SCALE) and not routed:
        return "int8, the stored scale"
    return f"int8, a scale for {'a token' if held.group is None else f'{max(32, held.group)} inputs of one'}"


def _on_gpu(scheme: str) -> str:
    if scheme in GPU_SCHEMES:
        group = GPU_SCHEMES[scheme]
        whose = "a scale for " + ("a token" if group is None else f"{group} inputs of one")
        if scheme.endswith(STORED_SCALE):
            whose = "the stored scale"
        problem = LinearFp8Problem(
            device="cuda", dtype=torch.bfloat16, inputs=128, outputs=128, group=group
        )
        if problem.quantized_from is None:
            return AS_THEY_ARE
        return f"e4m3, {whose}, from {problem.quantized_from} tokens of a step on"
    whose = "the stored scale" if scheme.endswith(STORED_SCALE) else "a scale for a token"
    if scheme.removesuffix(STORED_SCALE).endswith(INT8_ROWS):
        first = INT8_FROM if scheme.startswith("int4") else STREAMED_TOKENS + 1
        return f"int8, {whose}, from {first} tokens of a step on"
    return AS_THEY_ARE


def _of_experts(scheme: str) -> str:
    if scheme not in GPU_SCHEMES or scheme == MICROSCALED:
        return AS_THEY_ARE
    stored = scheme.endswith(STORED_SCALE)
    whose = "the largest stored scale" if stored else f"a scale for {GROUP} inputs of one"
    return f"e4m3, {whose}, from {QUANTIZED_FROM} tokens of a step on"
