"""Triton's attention inside spans (KRN-11): every head size, odd lengths, windows, heads that share keys; each span
alone gives the same bits. In the interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.op import Kernel, float_tolerance
from headrace.back.kernels.span_attention import library_spans, op, triton_spans
from headrace.back.kernels.triton.wrap import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = [torch.float32, torch.float16 if interpreted() else torch.bfloat16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
STARTS = [0, 1, 6, 6, 150, 167]
WHOLE = [16, 64, 72, 80, 128]
"""Heads that GPUs take in 16 bits too."""


def problem(head_dim: int, dtype: torch.dtype, **changes: object) -> op.SpanAttentionProblem:
    shape = {"device": DEVICE, "dtype": dtype, "heads": 2, "kv_heads": 2, "head_dim": head_dim}
    return op.SpanAttentionProblem(**{**shape, "scale": head_dim**-0.5, **changes})


def inputs(one: op.SpanAttentionProblem, tokens: int) -> list[torch.Tensor]:
    """Views of one tensor, as a merged projection gives them, between NaN."""
    generator = torch.Generator().manual_seed(3)
    columns = (one.heads + 2 * one.kv_heads) * one.head_dim
    qkv = torch.randn(tokens + 2, columns, generator=generator).to(one.dtype).to(DEVICE)
    qkv[0], qkv[-1] = float("nan"), float("nan")
    heads = qkv[1:-1].unflatten(1, (-1, one.head_dim))
    return list(heads.split((one.heads, one.kv_heads, one.kv_heads), dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 64, 72, 80, 128] if interpreted() else WHOLE)
def test_it_equals_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    one = problem(head_dim, dtype)
    arguments = inputs(one, STARTS[-1])
    got = triton_spans.bind(one)(*arguments, STARTS)
    want = op.bind_reference(one)(*arguments, STARTS)
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error <= float_tolerance(dtype), error


def test_heads_of_72_give_the_same_over_and_over() -> None:
    """SigLIP's 16 heads of 72 over images of 256 to 4,096 patches: loads overlap with products, and nothing races."""
    long = [0, 256, 260, 1284, 5380] if not interpreted() else [0, 130, 137]
    one = problem(72, DTYPES[1], heads=16, kv_heads=16)
    arguments = inputs(one, long[-1])
    attend = triton_spans.bind(one)
    want = op.bind_reference(one)(*arguments, long)
    first = attend(*arguments, long)
    error = (first.float() - want.float()).abs().max() / want.float().abs().max()
    assert error <= float_tolerance(DTYPES[1]), error
    for _ in range(1 if interpreted() else 50):
        assert torch.equal(attend(*arguments, long), first)


@pytest.mark.parametrize("changes", [{"window": 5}, {"window": 70}, {"heads": 4}])
def test_windows_and_shared_keys(changes: dict[str, int]) -> None:
    one = problem(32, torch.float32, **changes)
    arguments = inputs(one, STARTS[-1])
    got = triton_spans.bind(one)(*arguments, STARTS)
    want = op.bind_reference(one)(*arguments, STARTS)
    assert (got - want).abs().max() <= float_tolerance(torch.float32) * want.abs().max()
    assert op.OP.error(triton_spans.KERNEL, one) <= float_tolerance(torch.float32)


def test_a_span_gives_the_same_bits_alone() -> None:
    one = problem(72 if interpreted() else 80, DTYPES[1])
    arguments = inputs(one, STARTS[-1])
    attend = triton_spans.bind(one)
    whole = attend(*arguments, STARTS)
    alone = attend(*(part[6:150] for part in arguments), [0, 144])
    assert torch.equal(whole[6:150], alone)


def test_a_gpu_takes_other_heads_in_32_bits_alone() -> None:
    """Heads that are loaded element by element gave wrong numbers on an H200 in bfloat16 (Triton 3.6)."""
    for head_dim in (20, *WHOLE):
        wide, half = (
            replace(problem(head_dim, dtype), device="cuda")
            for dtype in (torch.float32, torch.bfloat16)
        )
        refused = triton_spans.KERNEL.supports(half)
        assert (refused is not None and "no multiple of 8" in refused) == (head_dim == 20)
        assert "no multiple of 8" not in (triton_spans.KERNEL.supports(wide) or "")


def test_heads_are_cut_in_two_powers_of_two() -> None:
    assert [triton_spans.parts(width) for width in (8, 16, 64, 72, 80, 96, 128, 160)] == [
        *((16, 0), (16, 0), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 32)),
    ]


@pytest.mark.skipif(interpreted(), reason="PyTorch's kernels for GPUs")
def test_long_spans_are_planned_when_they_come_again() -> None:
    """By ours, then by the library's: a length for the first time, again, recorded, and lengths side by side."""
    one = problem(72, torch.bfloat16)
    library_spans._known.cache_clear()
    attend, known = library_spans.LONG.bind(one), library_spans._known(one)
    reference = op.bind_reference(one)
    for starts in ([0, 150], [0, 2048, 4096], [0, 4096, 5000], [0, 1400], [0, 12_288]):
        for _ in range(4):
            arguments = inputs(one, starts[-1])
            got, want = attend(*arguments, starts), reference(*arguments, starts)
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
            assert error <= float_tolerance(torch.bfloat16), (starts, error)
    assert known == {(): True, (2048, 2048): True, (12_288,): True}
    arguments, starts = inputs(one, 4096), [0, 2048, 4096]
    attend(*(each[:3000] for each in arguments), [0, 3000])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(*arguments, starts)
        fresh = attend(*(each[:3000] for each in arguments), [0, 3000])
    graph.replay()
    for y, places in ((got, starts), (fresh, [0, 3000])):
        want = reference(*(each[: places[-1]] for each in arguments), places)
        assert (y.float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()
    assert known.keys() == {(), (2048, 2048), (12_288,)}


@pytest.mark.skipif(interpreted(), reason="PyTorch's kernels for GPUs")
@pytest.mark.parametrize(
    "kernel", [library_spans.CUDNN, library_spans.FLASH], ids=lambda one: one.name
)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_pytorch_s_kernels_equal_the_reference(kernel: Kernel, head_dim: int) -> None:
    one = problem(head_dim, torch.bfloat16)
    assert kernel.supports(one) is None
    for starts in ([0, 1, 6, 6, 150, 167], [0, 256, 512, 768], [0, 4096]):
        arguments = inputs(one, starts[-1])
        got = kernel.bind(one)(*arguments, starts)
        want = op.bind_reference(one)(*arguments, starts)
        error = (got.float() - want.float()).abs().max() / want.float().abs().max()
        assert error <= float_tolerance(torch.bfloat16), (starts, error)


def test_spans_of_one_length_are_taken_together() -> None:
    assert library_spans.runs_of([0, 4, 8, 8, 10, 12, 13]) == [(0, 8, 4), (8, 12, 2), (12, 13, 1)]
    assert library_spans.runs_of([0]) == library_spans.runs_of([0, 0]) == []
    for change in ({"window": 5}, {"softcap": 2.0}, {"kv_heads": 1}, {"head_dim": 20}):
        one = replace(problem(64, torch.bfloat16), **{"device": "cuda", **change})
        assert library_spans.FLASH.supports(one) is not None
