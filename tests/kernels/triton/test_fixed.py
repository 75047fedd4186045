"""The kernels of deterministic mode: a row's bits depend on the row alone. In Triton's interpreter and on a GPU, as
test_kernels.py; closeness to the references is held there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention import triton_fixed as fixed_attention
from headrace.back.kernels.fused_linear import op as fused_linear
from headrace.back.kernels.fused_linear import triton_fixed as fused_fixed
from headrace.back.kernels.linear.op import OP as LINEAR
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.linear.triton_fixed import KERNEL as FIXED
from headrace.back.kernels.linear.triton_fixed import fixed, shares
from headrace.back.kernels.linear.triton_small import Gemm
from headrace.back.kernels.merge_attention import triton_merge_attention
from headrace.back.kernels.op import float_tolerance
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.partial_attention import check_merged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = "cpu" if interpreted() else "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [FP32, FP16] if interpreted() else [FP32, FP16, BF16]


@pytest.fixture(autouse=True)
def order_of_sums_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix instruction adds up along its inner dimension in one order, whatever its other
    sizes. NumPy's BLAS, by which the interpreter multiplies, does so on some CPUs only: in float64,
    rounded once, its order does not show."""
    if not interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
    ) -> TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    error = (ours.double() - expected.double()).abs().max().item()
    return error <= float_tolerance(dtype) * expected.double().abs().max().item()


WIDE = [(128, 1024, ""), (96, 72, ""), (64, 136, "silu")]
if not interpreted():
    WIDE += [(320, 1096, ""), (4096, 4096, ""), (4096, 12288, ""), (12288, 4096, "silu")]
COUNTS = (1, 17, 64, 65, 130) if interpreted() else (1, 2, 7, 31, 64, 65, 128, 200, 513, 2048)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("results, inputs, activation", WIDE)
def test_a_product_gives_a_row_the_same_bits_among_any_number(
    dtype: torch.dtype, results: int, inputs: int, activation: str
) -> None:
    """ENG-17, KRN-22, REG-042: shares side by side or in turn, small tiles or large, any place in the batch."""
    outputs = 2 * results if activation else results
    weight = random(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    x = random(COUNTS[-1], inputs, dtype=dtype, seed=2)
    bias = random(outputs, dtype=dtype, seed=3)
    run = fixed(Gemm(weight_OI=weight, bias_O=bias, activation=activation))
    whole = torch.full((len(x), results), float("nan"), dtype=dtype, device=DEVICE)
    run(x, whole)
    assert bool(torch.isfinite(whole).all())
    for count in COUNTS[:-1]:
        for first in {0, 5 % (len(x) - count), len(x) - count}:
            some = torch.full((count, results), float("nan"), dtype=dtype, device=DEVICE)
            run(x[first : first + count].clone(), some)
            assert torch.equal(some, whole[first : first + count]), (count, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs", [(512, 4096), (70, 136)] if not interpreted() else [(70, 136), (64, 520)]
)
def test_a_product_agrees_with_the_reference(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    for bias in (False, True):
        problem = LinearProblem(
            device=DEVICE, dtype=dtype, inputs=inputs, outputs=outputs, bias=bias, wide=bias
        )
        assert LINEAR.error(FIXED, problem) <= float_tolerance(dtype)
    product = fused_linear.FusedLinearProblem(
        device=DEVICE, dtype=dtype, inputs=inputs, outputs=2 * outputs, eps=1e-6, activation="silu"
    )
    assert fused_linear.OP.error(fused_fixed.KERNEL, product) <= 2 * float_tolerance(dtype)


def test_shares_are_by_the_shape_alone() -> None:
    assert [shares(n, 4096, gated=False) for n in (1024, 4096, 6144, 24576, 151936)] == [
        8,
        4,
        2,
        1,
        1,
    ]
    assert shares(1024, 512, gated=False) == 1 and shares(4096, 12288, gated=True) == 1


def problem_of(dtype: torch.dtype, **more: object) -> attention.AttentionProblem:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "block_tokens": 16, **more}
    return attention.AttentionProblem(
        device=DEVICE, dtype=dtype, scale=shape["head_dim"] ** -0.5, **shape
    )


ATTENTION = [
    {},
    {"heads": 6, "head_dim": 80, "window": 300, "softcap": 30.0},
    {"window": 40},
    {"chunk": 96},
    {"slopes": (0.5, 0.25, 0.125, 0.0625)},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "more", [*ATTENTION, {"bias_width": 40}, {"bias_width": 700, "window": 60}]
)
def test_attention_agrees_with_the_reference(dtype: torch.dtype, more: dict) -> None:
    problem = problem_of(dtype, **more)
    assert attention.OP.error(fixed_attention.KERNEL, problem) <= float_tolerance(dtype)


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1, 0), (19, 20, 3), (2, 20, 0), (15, 20, 2)],
        pytest.param(
            [(0, 1, 0), (69, 70, 3), (3, 20, 0), (20, 70, 2), (33, 34, 4)], marks=pytest.mark.slow
        ),
    ],
    ids=["20", "70"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", ATTENTION)
def test_attention_gives_a_position_the_same_bits_in_any_step(
    dtype: torch.dtype, more: dict, parts: list[tuple[int, int, int]]
) -> None:
    """ENG-05, ENG-17, REG-010: one prompt whole, in chunks, and token by token, beside others or alone."""
    problem = problem_of(dtype, **more)
    length = 560 if interpreted() else 5000
    begin = length - max(last for _, last, _ in parts)
    attend = fixed_attention.bind(problem)
    whole_plan, blocks = attention.sample_plan(
        [(length - begin, length)], block_tokens=16, window=None, device=DEVICE
    )
    kv = random(blocks, 2, problem.kv_heads, 16, problem.head_dim, dtype=dtype, seed=4)
    q = random(length - begin, problem.heads, problem.head_dim, dtype=dtype, seed=5)
    whole = attend(q, kv, whole_plan)
    assert bool(torch.isfinite(whole).all())

    def part(first: int, last: int, others: int) -> torch.Tensor:
        """Queries first .. last of the prompt, after `others` decodes of another row's cache."""
        rows = [(1, 520 + i) for i in range(others)] + [(last - first, begin + last)]
        plan, _ = attention.sample_plan(rows, block_tokens=16, window=None, device=DEVICE)
        wide = torch.zeros(
            len(rows), whole_plan.block_table_RB.shape[1], dtype=torch.int32, device=DEVICE
        )
        wide[:] = whole_plan.block_table_RB[0]
        plan = attention.SamplePlan(**{**vars(plan), "block_table_RB": wide})
        fill = random(others, problem.heads, problem.head_dim, dtype=dtype, seed=6)
        return attend(torch.cat([fill, q[first:last]]), kv, plan)[others:]

    for first, last, others in parts:
        ours = part(first, last, others)
        assert torch.equal(ours, whole[first:last]), (first, last, others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_halves_merge_to_the_whole(dtype: torch.dtype, sinks: bool) -> None:
    problem, rows = problem_of(dtype, sinks=sinks), [(1, 1200), (1, 12), (3, 3), (40, 95)]
    sinks_H = torch.linspace(-1, 3, 4, device=DEVICE) if sinks else None
    plan, blocks = attention.sample_plan(rows, block_tokens=16, window=None, device=DEVICE)
    kv = random(blocks, 2, 2, 16, 64, dtype=dtype, seed=9)
    q = random(45, 4, 64, dtype=dtype, seed=10)
    bound = {FP16: 4e-3}.get(dtype, 2e-2)
    check_merged(
        fixed_attention.bind,
        triton_merge_attention.bind,
        problem,
        q,
        kv,
        plan,
        bound=bound,
        sinks_H=sinks_H,
    )


def test_attention_is_the_same_where_parts_are_merged_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows beyond the memory for parts go through them in turn."""
    problem = problem_of(FP16)
    rows = [(1, 1500), (1, 1024), (1, 2), (1, 513), (1, 1600)]
    plan, blocks = attention.sample_plan(rows, block_tokens=16, window=None, device=DEVICE)
    kv = random(blocks, 2, 2, 16, 64, dtype=FP16, seed=7)
    q = random(len(rows), 4, 64, dtype=FP16, seed=8)
    found = []
    for most in (1024, 5, 1):
        monkeypatch.setattr(fixed_attention, "MAX_SPLITS", most)
        found.append(fixed_attention.bind(problem)(q, kv, plan))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
