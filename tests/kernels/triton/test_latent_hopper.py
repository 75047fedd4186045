"""Latent attention on Hopper: decodes over latents, prompts over what was expanded from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.expanded_attention import op as expanded_attention
from headrace.back.kernels.expanded_attention import triton_hopper as expanded_hopper
from headrace.back.kernels.latent_attention import op as latent_attention
from headrace.back.kernels.latent_attention import triton_hopper
from tests.kernels.latent import attention_problem, check_padding
from tests.kernels.triton.test_kernels import BF16, BOUND, DEVICE, FP16, NAN, close
from tests.kernels.triton.test_prefill import hopper_only

pytestmark = pytest.mark.gpu

SHAPES = [(16, 512, 64, 16), (40, 256, 32, 16), (128, 512, 64, 64), (3, 512, 64, 8)]


@hopper_only
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_over_latents_equal_the_reference(shape, dtype):
    """KRN-01: rows that many programs share, rows of one position, rows of padding."""
    problem = attention_problem(shape, dtype, DEVICE)
    assert latent_attention.OP.error(triton_hopper.KERNEL, problem) <= BOUND[dtype]
    check_padding(problem, triton_hopper.bind, BOUND[dtype])


@hopper_only
@pytest.mark.parametrize("lengths", [(1,), (9000,), (1, 2, 3), (64, 128, 5000, 1), (300,) * 200])
def test_splits_are_merged_whatever_the_rows(lengths):
    """KRN-01: what no row has written is NaN, and so is the output before; a graph gives the same."""
    problem = attention_problem((16, 512, 64, 16), BF16, DEVICE)
    rows = [(1, length) for length in lengths]
    plan, blocks = sample_plan(rows, block_tokens=16, window=None, device=DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(4)
    new = {"device": DEVICE, "dtype": BF16, "generator": generator}
    kv = torch.full((blocks, 16, problem.width), NAN, device=DEVICE, dtype=BF16)
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        block = plan.block_table_RB[row].cpu()[position // 16].long()
        kv[block, position % 16] = torch.randn(length, problem.width, **new)
    q = torch.randn(len(rows), 16, problem.width, **new)
    run = triton_hopper.bind(problem)
    expected = latent_attention.bind_reference(problem)(q, kv, plan)
    found = run(q, kv, plan)
    assert close(found, expected, BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [run(q, kv, plan) for _ in range(3)][-1]
    recorded.fill_(NAN)
    graph.replay()
    assert torch.equal(recorded, found)


@hopper_only
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads, own, rotary", [(16, 128, 64), (5, 64, 32)])
def test_expanded_attention_equals_the_reference(heads, own, rotary, dtype):
    """KRN-06: new rows and rows behind a prefix, tiles that are not full, longer than one round."""
    problem = expanded_attention.ExpandedAttentionProblem(
        device=DEVICE,
        dtype=dtype,
        heads=heads,
        own=own,
        values=own,
        rotary=rotary,
        scale=(own + rotary) ** -0.5,
    )
    assert expanded_attention.OP.error(expanded_hopper.KERNEL, problem) <= BOUND[dtype]


@hopper_only
def test_rows_that_decode_beside_are_left_out():
    problem = expanded_attention.ExpandedAttentionProblem(
        device=DEVICE, dtype=BF16, heads=4, own=128, values=128, rotary=64, scale=0.07
    )
    *arguments, begin_R, plan = expanded_attention.OP.sample(problem).arguments
    q_THN, q_THR, *positions = arguments
    expected = expanded_hopper.bind(problem)(*arguments, begin_R, plan)
    ahead = [torch.cat((torch.full_like(q[:1], NAN), q)) for q in (q_THN, q_THR)]
    zero = plan.query_start_R1[:1]
    beside = replace(
        plan,
        query_start_R1=torch.cat((zero, plan.query_start_R1 + 1)),
        kv_len_R=torch.cat((zero + 700, plan.kv_len_R)),
        block_table_RB=torch.cat((plan.block_table_RB[:1], plan.block_table_RB)),
    )
    found = expanded_hopper.bind(problem)(*ahead, *positions, torch.cat((zero, begin_R)), beside)
    assert torch.equal(found[1:], expected)
