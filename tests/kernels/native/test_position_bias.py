"""Position biases in attention: the references against scores written out, the native kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.back.kernels.attention import native
from headrace.back.kernels.attention.op import OP, AttentionProblem, sample_plan
from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.span_attention.op import SpanAttentionProblem
from headrace.back.kernels.span_attention.op import bind_reference as bind_spans
from headrace.back.layers.position_bias import bucket_of


def problem(**more: object) -> AttentionProblem:
    values = {"device": "cpu", "dtype": torch.float32, "heads": 4, "kv_heads": 2, "head_dim": 12}
    return AttentionProblem(
        **{**values, "block_tokens": 16, "scale": 1.0, "bias_width": 21, **more}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "more",
    [
        *({}, {"scale": 0.3}, {"window": 30}, {"sinks": True}),
        *({"bias_rank": 5, "scale": 0.3}, {"bias_rank": 3, "window": 17, "bias_width": 17}),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_the_native_kernel_adds_biases_as_defined(library, dtype, more, whole) -> None:
    case = problem(dtype=dtype, **more)
    kernel = Kernel(
        name="native",
        supports=lambda problem: None,
        bind=lambda problem, *weights: native.bind_with(library, problem, *weights, whole=whole),
    )
    assert OP.error(kernel, case) <= OP.tolerance(case)


def test_the_reference_adds_the_bias_of_each_distance() -> None:
    case = problem(kv_heads=4, head_dim=8, bias_width=5)
    rows = [(1, 1), (1, 19), (7, 23)]
    plan, num_blocks = sample_plan(rows, block_tokens=16, window=None, device="cpu")
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(num_blocks, 2, 4, 16, 8, generator=generator)
    q = torch.randn(9, 4, 8, generator=generator)
    bias_HW = torch.randn(4, 5, generator=generator)
    out = bind_reference(case, None, bias_HW)(q, kv, plan)
    for row, (queries, length) in enumerate(rows):
        blocks = plan.block_table_RB[row].long()
        k, v = kv[blocks].transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :length].unbind(0)
        for i in range(queries):
            at, position = int(plan.host_query_start[row]) + i, length - queries + i
            scores = torch.einsum("hd,shd->hs", q[at], k[: position + 1])
            scores += bias_HW[:, (position - torch.arange(position + 1)).clamp(max=4)]
            wanted = torch.einsum("hs,shd->hd", scores.softmax(-1), v[: position + 1])
            assert torch.allclose(out[at], wanted, atol=1e-5)


def test_the_reference_adds_the_bias_that_follows_from_a_state() -> None:
    case = problem(kv_heads=2, head_dim=8, bias_width=5, bias_rank=3)
    rows = [(1, 19), (7, 23)]
    plan, num_blocks = sample_plan(rows, block_tokens=16, window=None, device="cpu")
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(num_blocks, 2, 2, 16, 8, generator=generator)
    q, states = (torch.randn(8, 4, size, generator=generator) for size in (8, 3))
    bias_RW = torch.randn(3, 5, generator=generator)
    out = bind_reference(case, None, bias_RW)(q, kv, plan, None, states)
    for row, (queries, length) in enumerate(rows):
        blocks = plan.block_table_RB[row].long()
        k, v = kv[blocks].transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :length].unbind(0)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        for i in range(queries):
            at, position = int(plan.host_query_start[row]) + i, length - queries + i
            scores = torch.einsum("hd,shd->hs", q[at], k[: position + 1])
            for head in range(4):
                for distance in range(5):
                    scores[head, position - distance] += states[at, head] @ bias_RW[:, distance]
            wanted = torch.einsum("hs,shd->hd", scores.softmax(-1), v[: position + 1])
            assert torch.allclose(out[at], wanted, atol=1e-5)


def test_spans_add_the_bias_of_each_distance_on_either_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.back.kernels.span_attention.op.BIAS_BYTES", 4 * 2 * 9 * 4)
    case = SpanAttentionProblem(
        device="cpu", dtype=torch.float32, heads=2, kv_heads=2, head_dim=4, scale=0.7, bias_reach=3
    )
    q, k, v = torch.randn(3, 10, 2, 4, generator=torch.Generator().manual_seed(2)).unbind(0)
    bias_HB = torch.randn(2, 7, generator=torch.Generator().manual_seed(3))
    out = bind_spans(case, bias_HB)(q, k, v, [0, 1, 10])
    at = torch.arange(9)
    scores = 0.7 * torch.einsum("qhd,khd->hqk", q[1:], k[1:])
    scores += bias_HB[:, (at[None, :] - at[:, None]).clamp(-3, 3) + 3]
    assert torch.allclose(
        out[1:], torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[1:]), atol=1e-5
    )
    assert torch.allclose(out[0], v[0])


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (16, 1000)])
def test_buckets_are_those_of_the_model(both_ways: bool, buckets: int, most: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-most if both_ways else 0, most + 1)
    theirs = T5Attention._relative_position_bucket(
        distance if both_ways else -distance, both_ways, buckets, most
    )
    ours = bucket_of(distance, buckets, most, both_ways=both_ways)
    assert torch.equal(ours, theirs)
    assert ours[-1] == buckets - 1
