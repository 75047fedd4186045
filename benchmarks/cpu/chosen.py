"""Attention over chosen positions and groups, and the choice: native against their references, at sizes of DeepSeek V4,
DeepSeek-V3.2 and MiniMax-M3 (fewer heads)."""

from __future__ import annotations

import torch
from measure import cell, interleaved, row, setup

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.compressed_attention import native as compressed
from headrace.back.kernels.compressed_attention import op as compressed_op
from headrace.back.kernels.group_select import native as group_select
from headrace.back.kernels.group_select import op as group_select_op
from headrace.back.kernels.group_write import native as group_write
from headrace.back.kernels.group_write import op as group_write_op
from headrace.back.kernels.sparse_latent_attention import native as latent
from headrace.back.kernels.sparse_latent_attention import op as latent_op

BLOCK, DTYPE = 128, torch.bfloat16
STEPS = {"4 decodes at 4,096": [(1, 4096)] * 4, "256 of a prompt at 4,096": [(256, 4096)]}


def cases(library, rows):
    """name -> (native, reference, arguments)."""
    plan, blocks = sample_plan(rows, block_tokens=BLOCK, window=None, device="cpu")
    tokens = sum(queries for queries, _ in rows)
    position_T = torch.cat([torch.arange(length - n, length) for n, length in rows])
    new = {"device": "cpu", "dtype": DTYPE, "block_tokens": BLOCK}

    def randn(*shape):
        return torch.randn(*shape).to(DTYPE)

    def attention(group, top_k):
        problem = compressed_op.CompressedProblem(
            heads=16, head_dim=512, window=128, group=group, top_k=top_k, scale=0.05, **new
        )
        places, count = max(1, BLOCK // group), 4096 // group
        chosen_TK = torch.arange(top_k).expand(tokens, -1) * (count // max(1, top_k))
        inputs = (randn(tokens, 16, 512), randn(blocks, BLOCK, 512), plan, position_T)
        inputs += (randn(blocks, places, 512), plan, chosen_TK.int().contiguous())
        sinks = torch.zeros(16)
        ours = compressed.bind_with(library, problem, sinks)
        return ours, compressed_op.bind_reference(problem, sinks), inputs

    def select(**facts):
        problem = group_select_op.GroupSelectProblem(**facts, **new)
        places = BLOCK if problem.best_key else BLOCK // problem.group
        inputs = (randn(tokens, problem.heads, problem.dim), randn(tokens, problem.heads))
        inputs += (randn(blocks, places, problem.dim), plan)
        ours = group_select.bind_with(library, problem)
        return ours, group_select_op.bind_reference(problem), inputs

    def write(**facts):
        problem = group_write_op.GroupWriteProblem(
            width=512, gated=True, eps=1e-6, rotary=64, offset=448, layout="pairs", **facts, **new
        )
        weights = torch.zeros(problem.group, problem.series * 512), torch.ones(512)
        inputs = (
            randn(blocks, BLOCK, problem.token_width),
            randn(blocks, BLOCK // problem.group, 512),
        )
        inputs += (torch.randn(4096, 64), plan, plan)
        ours = group_write.bind_with(library, problem, *weights)
        return ours, group_write_op.bind_reference(problem, *weights), inputs

    def sparse():
        problem = latent_op.SparseLatentProblem(
            heads=16, rank=512, rotary=64, top_k=1024, scale=0.05, **new
        )
        inputs = randn(tokens, 16, 576), randn(blocks, BLOCK, 576), plan
        inputs += (torch.arange(1024).int().expand(tokens, -1).contiguous(),)
        ours = latent.bind_with(library, problem)
        return ours, latent_op.OP.reference.bind(problem), inputs

    return {
        "compressed_attention, 512 of groups of 4": attention(4, 512),
        "compressed_attention, all groups of 128": attention(128, 0),
        "group_select, 64 heads of 128, 512 of groups of 4": select(
            heads=64, dim=128, group=4, top_k=512
        ),
        "group_select, best keys, 4 heads of 128, 16 of groups of 128": select(
            heads=4, dim=128, group=128, top_k=16, best_key=True, local=1
        ),
        "group_write, two series of groups of 4": write(group=4, series=2),
        "group_write, groups of 128": write(group=128),
        "sparse_latent_attention, 16 heads, 1,024 positions": sparse(),
    }


def main() -> None:
    library, arguments = setup(__doc__)
    row("op", "step", "native us", "reference us", "ratio")
    row(*["---"] * 5)
    for step, rows in STEPS.items():
        for name, (native, reference, inputs) in cases(library, rows).items():
            if arguments.only not in name:
                continue
            taken = interleaved(
                {"native": lambda: native(*inputs), "reference": lambda: reference(*inputs)},  # noqa: B023 - called in this turn
                seconds=arguments.seconds,
                processor=arguments.processor,
            )
            ratio = taken["reference"][0] / taken["native"][0]
            row(name, step, cell(taken["native"]), cell(taken["reference"]), f"{ratio:.1f}")


if __name__ == "__main__":
    main()
