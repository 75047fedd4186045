"""Problems and checks that tests of kernels over latents share, native and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.head_linear.op import HeadLinearProblem
from headrace.back.kernels.latent_attention import op as latent_attention
from headrace.back.kernels.latent_attention.op import (
    LatentAttentionFunction,
    LatentAttentionProblem,
)
from headrace.back.kernels.latent_write.op import LatentWriteProblem

# heads, rank, rotary, block_tokens; DeepSeek's sizes and odd ones
SHAPES = [(16, 512, 64, 16), (5, 24, 6, 7), (40, 256, 32, 16)]
Bind = Callable[[LatentAttentionProblem], LatentAttentionFunction]


def attention_problem(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> LatentAttentionProblem:
    heads, rank, rotary, block_tokens = shape
    return LatentAttentionProblem(
        device=device,
        dtype=dtype,
        heads=heads,
        rank=rank,
        rotary=rotary,
        block_tokens=block_tokens,
        scale=(rank / 4 + rotary) ** -0.5,
    )


def write_problem(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, layout: str
) -> LatentWriteProblem:
    heads, rank, rotary, block_tokens = shape
    return LatentWriteProblem(
        device=device,
        dtype=dtype,
        heads=heads,
        nope=rank // 4,
        rank=rank,
        rotary=rotary,
        block_tokens=block_tokens,
        eps=1e-6,
        layout=layout,
    )


def head_problem(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> HeadLinearProblem:
    heads, rank, _, _ = shape
    return HeadLinearProblem(
        device=device, dtype=dtype, heads=heads, inputs=rank, outputs=rank // 4 + 1
    )


def check_padding(problem: LatentAttentionProblem, bind: Bind, bound: float) -> None:
    """Rows of padding, and what no row has written, reach no result; log-sum-exps are right."""
    rows = [(1, 1), (1, 37), (1, 700), (3, 3), (20, 55)]
    plan, blocks = sample_plan(
        rows, block_tokens=problem.block_tokens, window=None, device=problem.device
    )
    new = {"dtype": problem.dtype, "device": problem.device}
    generator = torch.Generator().manual_seed(3)
    kv = torch.full((blocks, problem.block_tokens, problem.width), float("nan"), **new)
    for row, length in enumerate(plan.host_kv_len.tolist()):
        position = torch.arange(length)
        block = plan.block_table_RB[row].cpu()[position // problem.block_tokens].long()
        latents = torch.randn(length, problem.width, generator=generator).to(**new)
        kv[block, position % problem.block_tokens] = latents
    tokens = sum(queries for queries, _ in rows)
    q = torch.randn(tokens + 3, problem.heads, problem.width, generator=generator).to(**new)
    q[tokens:] = float("nan")
    padded = replace(
        plan,
        query_start_R1=torch.cat((plan.query_start_R1, plan.query_start_R1[-1:].expand(2))),
        kv_len_R=torch.nn.functional.pad(plan.kv_len_R, (0, 2)),
        block_table_RB=torch.nn.functional.pad(
            plan.block_table_RB, (0, 3, 0, 2), value=1 << 20
        ).contiguous(),
        host_query_start=None,
        host_kv_len=None,
    )
    lse = torch.empty(q.shape[:2], device=problem.device)
    out = bind(problem)(q, kv, padded, lse)
    exact = torch.empty((tokens, problem.heads), device=problem.device)
    # Of two sums in float32 neither is nearer: each may miss by the bound alone.
    reference = latent_attention.bind_reference(replace(problem, dtype=torch.float64))
    expected = reference(q[:tokens].double(), kv.double(), plan, exact)
    assert (out[:tokens].float() - expected).abs().max() <= bound * expected.abs().max()
    torch.testing.assert_close(lse[:tokens], exact, rtol=bound, atol=bound)


def check_chunks(
    problem: LatentAttentionProblem,
    bind: Bind,
    *,
    first: int = 0,
    parts: tuple[tuple[int, int], ...] = ((599, 600), (590, 597), (520, 610)),
) -> None:
    """A query at a position has the same bits as a decode and in the chunks of `parts`, beside other rows, as in the
    one that begins at `first`."""
    length = 610
    plan, blocks = sample_plan(
        [(length, length)], block_tokens=problem.block_tokens, window=None, device=problem.device
    )
    new = {"dtype": problem.dtype, "device": problem.device}
    generator = torch.Generator().manual_seed(5)
    kv = torch.randn(blocks, problem.block_tokens, problem.width, generator=generator).to(**new)
    q = torch.randn(length, problem.heads, problem.width, generator=generator).to(**new)
    attend = bind(problem)

    def chunk(begin: int, end: int) -> torch.Tensor:
        part = replace(
            plan,
            query_start_R1=torch.tensor([0, end - begin], dtype=torch.int32, device=q.device),
            kv_len_R=torch.tensor([end], dtype=torch.int32, device=q.device),
            host_query_start=None,
            host_kv_len=None,
            num_decodes=int(end - begin == 1),
            max_query_len=end - begin,
            max_kv_len=end,
        )
        return attend(q[begin:end].contiguous(), kv, part)

    whole = chunk(first, length)
    for begin, end in parts:
        assert torch.equal(chunk(begin, end), whole[begin - first : end - first])
