"""Kernels of quantized weights and caches on small odd shapes, for compute-sanitizer's memcheck (evidence.py): odd
numbers of rows, inputs that are whole groups but not whole steps, experts that nobody or everybody chose.

    python -m benchmarks.h200.memory_checks "e4m3"      launches one family's kernels once
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention import triton_attention
from headrace.back.kernels.experts.op import SWIGLU_OAI, ExpertsProblem
from headrace.back.kernels.experts_bytes import op as byte_experts
from headrace.back.kernels.experts_bytes import triton_experts_bytes
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_fp8 import op as fp8_experts
from headrace.back.kernels.experts_fp8 import triton_experts_fp8
from headrace.back.kernels.experts_int4 import op as int4_experts
from headrace.back.kernels.experts_int4 import triton_experts_int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.kernels.linear_fp8 import op as fp8
from headrace.back.kernels.linear_fp8 import triton_linear_fp8
from headrace.back.kernels.linear_int4 import op as int4
from headrace.back.kernels.linear_int4 import triton_linear_int4
from headrace.back.kernels.linear_int8 import op as int8
from headrace.back.kernels.linear_int8 import triton_linear_int8
from headrace.back.kernels.qk_rope_write import op as qk_rope_write
from headrace.back.kernels.qk_rope_write import triton_qk_rope_write

NEW: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
ROWS = (1, 7, 17, 67)
MANY = 300
AROUND: tuple[dict[str, Any], ...] = (
    {"eps": 1e-6, "activation": "silu", "outputs": 384},
    {"add": True, "bias": True, "outputs": 200},
)
"""What stands around a layer, and its outputs: no whole tiles."""
MIXTURES = (
    ExpertsProblem(**NEW, experts=12, slots=3, width=544, inner=288),
    ExpertsProblem(
        **NEW, experts=12, slots=3, width=1056, inner=352, activation=SWIGLU_OAI, clamp=7.0, bias=True
    ),
)  # fmt: skip
"""Sizes of gpt-oss's kind: no multiples of 128."""


def layers(module: Any, kernel: Any, problem: Any, forms: tuple[dict[str, Any], ...]) -> int:
    """Launches of a linear layer with each form and each surrounding."""
    count = 0
    for form in forms:
        for around in AROUND:
            facts = {"inputs": 400 if form.get("group") in (None, 16) else 1184, **around, **form}
            case = problem(**NEW, **facts)
            reason = kernel.KERNEL.supports(case)
            assert reason is None, (case, reason)
            sample = module.sample_of(case, (*ROWS, MANY))
            run = kernel.bind(case, *sample.weights)
            for arguments in (sample.arguments, *sample.further):
                run(*arguments)
                count += 1
    return count


def mixtures(module: Any, kernel: Any, cases: Iterator[Any], plans: Callable[[Any], Any]) -> int:
    """Launches of experts by each plan."""
    count = 0
    for case in cases:
        reason = kernel.KERNEL.supports(case)
        assert reason is None, (case, reason)
        sample = module.sample_of(case, ROWS)
        for plan in plans(sample.problem):
            run = kernel.bind(sample.problem, *sample.weights, always=plan)
            for arguments in (sample.arguments, *sample.further):
                run(*arguments)
                count += 1
    return count


def fp8_layers(*groups: int | None) -> int:
    forms: list[dict[str, Any]] = [{"group": group} for group in groups]
    if None in groups:
        forms += [{"group": None, "fixed": True}]
    count = layers(fp8, triton_linear_fp8, fp8.LinearFp8Problem, tuple(forms))
    for group in groups:
        if group == triton_linear_fp8.MICROSCALED:
            continue
        facts: dict[str, Any] = {"inputs": 400, "group": group, "add": True, "outputs": 208}
        case = fp8.LinearFp8Problem(**NEW, **facts, gated="silu")
        sample = fp8.sample_of(case, (67,))
        triton_linear_fp8.bind(case, *sample.weights)(*sample.arguments)
        count += 1
    return count


def int4_layers(*forms: dict[str, Any]) -> int:
    return layers(int4, triton_linear_int4, int4.LinearInt4Problem, forms)


def int8_layers(*forms: dict[str, Any]) -> int:
    return layers(int8, triton_linear_int8, int8.LinearInt8Problem, forms)


def int4_mixtures(*forms: Int4Form) -> int:
    cases = (
        int4_experts.ExpertsInt4Problem(mixture=mixture, form=form)
        for mixture in MIXTURES
        for form in forms
    )
    return mixtures(
        int4_experts, triton_experts_int4, cases, lambda case: triton_experts_int4.PLANS
    )


def byte_mixtures(*forms: ByteForm) -> int:
    cases = (
        byte_experts.ExpertsBytesProblem(mixture=mixture, form=form)
        for mixture in MIXTURES
        for form in forms
        if mixture.width % (form.group or 1) == mixture.inner % (form.group or 1) == 0
    )
    return mixtures(byte_experts, triton_experts_bytes, cases, lambda case: (16, 32, 64))


def fp8_mixtures() -> int:
    cases = (
        fp8_experts.ExpertsFp8Problem(mixture=mixture, group=group)
        for mixture in MIXTURES
        for group in (None, 128)
    )
    return mixtures(
        fp8_experts, triton_experts_fp8, cases,
        lambda case: triton_experts_fp8.all_plans(streamed=triton_experts_fp8.streams(case)),
    )  # fmt: skip


def caches(*forms: str) -> int:
    """Writes with norm and rotation, and attention over what a cache holds."""
    shape: dict[str, Any] = {
        **NEW,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "block_tokens": 16,
    }
    for form in forms:
        read = attention.AttentionProblem(**shape, scale=128**-0.5, quantized=form)
        written = qk_rope_write.QKRopeWriteProblem(
            **shape, rotary_dim=128, eps=1e-6, quantized=form
        )
        for module, kernel, case in (
            (attention, triton_attention, read),
            (qk_rope_write, triton_qk_rope_write, written),
        ):
            reason = kernel.KERNEL.supports(case)
            assert reason is None, (case, reason)
            sample = module.OP.sample(case)
            run = kernel.bind(sample.problem, *sample.weights)
            for arguments in (sample.arguments, *sample.further):
                run(*arguments)
    return 2 * len(forms)


FAMILIES: dict[str, Callable[[], int]] = {
    "e4m3": lambda: fp8_layers(None),
    "e4m3 blocks, MXFP8": lambda: fp8_layers(128, 32),
    "int4 groups": lambda: int4_layers(
        {"group": 128}, {"group": 32, "minima": True}, {"group": 128, "int8_rows": True}
    ),
    "MXFP4, NVFP4, nf4": lambda: int4_layers(
        {"group": 32, "floats": True},
        {"group": 16, "floats": True},
        {"group": 64, "floats": True, "levels": "nf4"},
    ),
    "int8": lambda: int8_layers(
        {"group": None}, {"group": None, "int8_rows": True}, {"group": 32, "int8_rows": True}
    ),
    "GGUF K types": lambda: (
        int8_layers({"group": 16}, {"group": 32, "minima": True})
        + int4_layers({"group": 32, "minima": True}, {"group": 16, "minima": True})
    ),
    "experts e4m3": fp8_mixtures,
    "experts of 4 bits": lambda: int4_mixtures(
        Int4Form(32, floats=True), Int4Form(16, floats=True), Int4Form(16, minima=True)
    ),
    "experts of bytes": lambda: byte_mixtures(
        ByteForm(None), ByteForm(16), ByteForm(32, floats=True)
    ),
    "caches of bytes": lambda: caches("int8", "fp8", "fp8_e5m2"),
    "caches of fewer bits": lambda: caches(
        "nvfp4", "int4", "int4-rotated", "int3-rotated", "turboquant-3bit"
    ),
}
"""Name -> how many launches of layers, experts or caches it made."""


def main() -> None:
    count = FAMILIES[sys.argv[1]]()
    if NEW["device"] == "cuda":
        torch.cuda.synchronize()
    print(f"{count} calls")


if __name__ == "__main__":
    main()
