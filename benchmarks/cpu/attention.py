"""Paged attention: native against the reference in PyTorch, decode and prefill."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from measure import cell, interleaved, row, setup

from headrace.back.kernels.attention.native import bind_with
from headrace.back.kernels.attention.op import AttentionProblem, sample_plan
from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.kv_write.quantized import SCALE_BYTES, quantize, values_and_scales
from headrace.back.kernels.native.library import NativeLibrary

HEADS = ((16, 8, 128), (32, 8, 128), (8, 8, 64))  # heads, KV heads, head_dim
STEPS = {
    "1 stream at 1,024": [(1, 1024)],
    "8 streams at 1,024": [(1, 1024)] * 8,
    "32 streams at 256": [(1, 256)] * 32,
    "prompt of 512": [(512, 512)],
    "chunk of 256 to 2,048": [(256, 2048)],
    "8 streams, chunk of 256": [(1, 512)] * 8 + [(256, 512)],
}
SHARED = 8, 1024
"""Streams that share a prefix of so many tokens."""


def shared_prefix(library: NativeLibrary, seconds: float) -> None:
    """Streams with blocks of their own, with the same blocks, and a prompt's last tokens over as many positions, which
    go by in one task: the bound of what sharing can save."""
    streams, length = SHARED
    row("KV", "heads / KV / size", "own blocks us", "the same blocks us", "a prompt's us")
    row(*["---"] * 5)
    for quantized, (heads, kv_heads, head_dim) in product((None, "int8", "fp8"), HEADS):
        problem = AttentionProblem(device="cpu", dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads,
                                   quantized=quantized, head_dim=head_dim, block_tokens=16,
                                   scale=head_dim**-0.5)  # fmt: skip
        native, new = (
            bind_with(library, problem),
            {"block_tokens": 16, "window": None, "device": "cpu"},
        )
        own, blocks = sample_plan([(1, length)] * streams, **new)
        same, _ = sample_plan([(1, length)] * streams, **new)
        same.block_table_RB.copy_(same.block_table_RB[:1].expand_as(same.block_table_RB))
        once, _ = sample_plan([(streams, length)], **new)
        q = torch.randn(streams, heads, head_dim).bfloat16()
        kv = torch.randn(blocks, 2, kv_heads, 16, head_dim).bfloat16()
        if quantized is not None:
            values = quantize(kv.float(), quantized)
            kv = kv.new_empty((*kv.shape[:-1], head_dim + SCALE_BYTES), dtype=torch.int8)
            for place, part in zip(values_and_scales(kv), values, strict=True):
                place.copy_(part)
        plans = {"own": own, "same": same, "once": once}
        calls = {name: partial(native, q, kv, plan) for name, plan in plans.items()}
        taken = interleaved(calls, seconds=seconds)
        sizes = f"{heads} / {kv_heads} / {head_dim}"
        row(quantized or "bf16", sizes, *(cell(taken[name]) for name in plans))


def main() -> None:
    library, arguments = setup(__doc__)
    shared_prefix(library, arguments.seconds)
    row(
        "dtype",
        "heads / KV / size",
        "step",
        "native us",
        "reference us",
        "ratio",
        "KV GB/s",
        "GFLOP/s",
    )
    row(*["---"] * 8)
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, head_dim in HEADS:
            problem = AttentionProblem(device="cpu", dtype=dtype, heads=heads, kv_heads=kv_heads,
                                       head_dim=head_dim, block_tokens=16, scale=head_dim**-0.5)  # fmt: skip
            native, reference = bind_with(library, problem), bind_reference(problem)
            for name, rows in STEPS.items():
                plan, blocks = sample_plan(rows, block_tokens=16, window=None, device="cpu")
                q = torch.randn(sum(n for n, _ in rows), heads, head_dim).to(dtype)
                kv = torch.randn(blocks, 2, kv_heads, 16, head_dim).to(dtype)
                taken = interleaved(
                    {
                        name: lambda f=f, q=q, kv=kv, plan=plan: f(q, kv, plan)
                        for name, f in (("native", native), ("reference", reference))
                    },
                    seconds=arguments.seconds,
                )
                best_us = taken["native"][1]
                kv_bytes = (
                    sum(length for _, length in rows) * 2 * kv_heads * head_dim * dtype.itemsize
                )
                pairs = sum(n * length - n * (n - 1) // 2 for n, length in rows)
                row(str(dtype)[6:], f"{heads} / {kv_heads} / {head_dim}", name, cell(taken["native"]),
                    cell(taken["reference"]), f"{taken['reference'][0] / taken['native'][0]:.1f}",
                    f"{kv_bytes / best_us / 1e3:.1f}",
                    f"{4 * heads * head_dim * pairs / best_us / 1e3:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
