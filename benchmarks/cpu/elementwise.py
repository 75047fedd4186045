"""Norms, RoPE, gated activation, KV write and sampling: native against their references."""

from __future__ import annotations

import torch
from measure import cell, interleaved, row, setup

from headrace.back.kernels.gated_act import native as gated_act
from headrace.back.kernels.gated_act import op as gated_act_op
from headrace.back.kernels.greedy import native as greedy
from headrace.back.kernels.greedy import op as greedy_op
from headrace.back.kernels.gumbel import native as gumbel
from headrace.back.kernels.gumbel import op as gumbel_op
from headrace.back.kernels.kv_write import native as kv_write
from headrace.back.kernels.kv_write import op as kv_write_op
from headrace.back.kernels.rms_norm import native as rms_norm
from headrace.back.kernels.rms_norm import op as rms_norm_op
from headrace.back.kernels.rope import native as rope
from headrace.back.kernels.rope import op as rope_op

DTYPE = torch.bfloat16
VOCABULARY = 151_936


def cases(library, tokens):
    """name -> (native, reference) at the sizes of a 0.6B model."""
    norm = rms_norm_op.RMSNormProblem(device="cpu", dtype=DTYPE, width=1024, eps=1e-6)
    head_norm = rms_norm_op.RMSNormProblem(device="cpu", dtype=DTYPE, width=128, eps=1e-6)
    turn = rope_op.RopeProblem(device="cpu", dtype=DTYPE, head_dim=128, rotary_dim=128)
    gate = gated_act_op.GatedActProblem(device="cpu", dtype=DTYPE, width=3072, activation="silu")
    write = kv_write_op.KVWriteProblem(
        device="cpu", dtype=DTYPE, kv_heads=8, head_dim=128, block_tokens=16
    )
    weight, weight_head = torch.ones(1024), torch.ones(128)
    x, residual = torch.randn(tokens, 1024).to(DTYPE), torch.randn(tokens, 1024).to(DTYPE)
    qkv = torch.randn(tokens, 32, 128).to(DTYPE)
    q, k, v = qkv[:, :16], qkv[:, 16:24], qkv[:, 24:]
    angles = torch.randn(4096, 64)
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.arange(tokens)
    gate_up = torch.randn(tokens, 6144).to(DTYPE)
    cache, slots = torch.zeros(tokens // 16 + 2, 2, 8, 16, 128, dtype=DTYPE), torch.arange(tokens)
    plan = {
        "rms_norm": (rms_norm.bind_norm_with(library, norm, weight), rms_norm_op.bind_norm(norm, weight), (x,)),
        "rms_norm per head": (rms_norm.bind_norm_with(library, head_norm, weight_head),
                              rms_norm_op.bind_norm(head_norm, weight_head), (q,)),
        "add_rms_norm": (rms_norm.bind_add_norm_with(library, norm, weight),
                         rms_norm_op.bind_add_norm(norm, weight), (x, residual)),
        "rope": (rope.bind_with(library, turn), rope_op.bind_reference(turn), (q, k, positions, table)),
        "gated_act silu": (gated_act.bind_with(library, gate), gated_act_op.bind_reference(gate), (gate_up,)),
        "kv_write": (kv_write.bind_with(library, write), kv_write_op.bind_reference(write), (k, v, cache, slots)),
    }  # fmt: skip
    if tokens <= 64:
        logits = torch.randn(tokens, VOCABULARY)
        ones, keys = torch.ones(tokens, dtype=torch.float64), torch.arange(tokens)
        plan["greedy"] = (greedy.bind_with(library), greedy_op.bind_reference(None), (logits,))
        plan["gumbel"] = (
            gumbel.bind_with(library),
            gumbel_op.bind_reference(None),
            (logits, ones, keys),
        )
    return plan


def main() -> None:
    library, arguments = setup(__doc__)
    row("op", "tokens", "native us", "reference us", "ratio")
    row(*["---"] * 5)
    for tokens in (1, 8, 32, 512):
        for name, (native, reference, inputs) in cases(library, tokens).items():
            taken = interleaved(
                {"native": lambda: native(*inputs), "reference": lambda: reference(*inputs)},  # noqa: B023 - called in this turn
                seconds=arguments.seconds,
            )
            ratio = taken["reference"][0] / taken["native"][0]
            row(name, tokens, cell(taken["native"]), cell(taken["reference"]), f"{ratio:.1f}")


if __name__ == "__main__":
    main()
