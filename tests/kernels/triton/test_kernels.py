"""Every Triton kernel against its reference: in Triton's interpreter (test_interpreter.py starts this file there), and
on a GPU, where sizes are larger and bfloat16 is tested too (`make test-gpu`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.activation import op as activation_op
from headrace.back.kernels.activation import triton_activation
from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention import triton_attention, triton_fixed
from headrace.back.kernels.fused_linear import op as fused_linear
from headrace.back.kernels.fused_linear import triton_fused_linear
from headrace.back.kernels.gated_act import op as gated_act
from headrace.back.kernels.gated_act import triton_gated_act
from headrace.back.kernels.gated_norm import op as gated_norm
from headrace.back.kernels.gated_norm import triton_gated_norm
from headrace.back.kernels.greedy import op as greedy
from headrace.back.kernels.greedy import triton_greedy
from headrace.back.kernels.gumbel import op as gumbel
from headrace.back.kernels.gumbel import triton_gumbel
from headrace.back.kernels.layer_norm import op as layer_norm
from headrace.back.kernels.layer_norm import triton_layer_norm
from headrace.back.kernels.linear import triton_linear
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.linear.table import GemmPlan
from headrace.back.kernels.linear.triton_small import Gemm, launcher
from headrace.back.kernels.merge_attention import triton_merge_attention
from headrace.back.kernels.merge_attention.op import MergeAttentionProblem
from headrace.back.kernels.qk_rope_write import op as qk_rope_write
from headrace.back.kernels.qk_rope_write import triton_qk_rope_write
from headrace.back.kernels.rms_norm import op as rms_norm
from headrace.back.kernels.rms_norm import triton_rms_norm
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.partial_attention import check_merged
from tests.kernels.test_merge_attention import check_merge

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
BOUND = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}
INF, NAN = float("inf"), float("nan")


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the largest error lies within the dtype's bound of the largest value."""
    ours, expected = ours.float(), expected.float()
    return bool((ours - expected).abs().max() <= BOUND[dtype] * expected.abs().max())


def random(*shape: int, seed: int = 0, device: str = DEVICE) -> torch.Tensor:
    """Normal numbers in float32, the same in every run and on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


# heads, KV heads, head_dim, block_tokens, window (negative: chunk), soft cap
SHAPES = [
    (4, 2, 64, 16, None, None),
    (7, 1, 16, 7, 3, None),
    (4, 4, 80, 16, None, 2.0),
    (8, 2, 96, 4, 20, 5.0),
    (2, 1, 128, 16, None, None),
    (2, 1, 256, 16, 30, None),
    (4, 2, 64, 16, -36, None),
]
ROWS = [(1, 1), (1, 37), (1, 300), (3, 3), (40, 95), (2, 130)]


def attention_case(shape, dtype, rows, *, pad_rows=0, pad_tokens=0):
    """A problem, its inputs on the device, and the plan with padding; what no row has written is NaN."""
    heads, kv_heads, head_dim, block_tokens, window, softcap = shape
    chunk = -window if window and window < 0 else None
    reach = {"window": None if chunk else window, "chunk": chunk}
    problem = attention.AttentionProblem(
        device=DEVICE, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        block_tokens=block_tokens, scale=head_dim**-0.5, softcap=softcap, **reach,
    )  # fmt: skip
    plan, blocks = attention.sample_plan(rows, block_tokens=block_tokens, **reach, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    tokens = sum(queries for queries, _ in rows)
    q = torch.randn(tokens + pad_tokens, heads + 2, head_dim, generator=generator).to(dtype)
    q[tokens:] = NAN
    kv = torch.randn(blocks, 2, kv_heads, block_tokens, head_dim, generator=generator).to(dtype)
    used = torch.zeros(blocks, block_tokens, dtype=torch.bool)
    for row, length in enumerate(plan.host_kv_len.tolist()):
        position = torch.arange(length)
        block = plan.block_table_RB[row].cpu()[position // block_tokens].long()
        used[block, position % block_tokens] = True
    used[0] = False
    kv.movedim(3, 1)[~used] = NAN
    padded = plan
    if pad_rows:
        ends = plan.query_start_R1[-1:].expand(pad_rows)
        table = torch.nn.functional.pad(plan.block_table_RB, (0, 3, 0, pad_rows), value=1 << 20)
        padded = replace(
            plan,
            query_start_R1=torch.cat((plan.query_start_R1, ends)),
            kv_len_R=torch.nn.functional.pad(plan.kv_len_R, (0, pad_rows)),
            block_table_RB=table,
            host_query_start=None,
            host_kv_len=None,
        )
    return problem, q.to(DEVICE)[:, :heads], kv.to(DEVICE), plan, padded


def exact(problem, q, kv, plan):
    """The reference in float32, over the tokens that are not padding."""
    tokens = int(plan.query_start_R1[-1])
    wide = attention.OP.reference.bind(replace(problem, dtype=FP32))
    return wide(q[:tokens].float(), kv.float(), plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_reference_and_reads_no_unused_place(dtype, shape):
    """KRN-10, REG-037."""
    problem, q, kv, plan, padded = attention_case(shape, dtype, ROWS, pad_rows=2, pad_tokens=3)
    out = triton_attention.bind(problem)(q, kv, padded)
    expected = exact(problem, q, kv, plan)
    assert close(out[: len(expected)], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 1, 3)])
def test_alibi_goes_onto_the_scores_of_prompts_and_decodes(dtype, shape):
    problem, q, kv, plan, padded = attention_case(shape, dtype, ROWS, pad_rows=2, pad_tokens=3)
    slopes = tuple(0.5 ** (i % 5 + 1) for i in range(problem.heads))
    problem = replace(problem, slopes=slopes)
    expected = exact(problem, q, kv, plan)
    assert close(triton_attention.bind(problem)(q, kv, padded)[: len(expected)], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 1, 3, 5)])
@pytest.mark.parametrize("fixed", [False, True])
def test_queries_that_see_each_other_look_back_as_far_as_the_window(dtype, shape, fixed):
    problem, q, kv, plan, padded = attention_case(shape, dtype, ROWS, pad_rows=2, pad_tokens=3)
    problem = replace(problem, causal=False)
    kernel = triton_fixed if fixed else triton_attention
    out = kernel.bind(problem)(q, kv, padded)
    expected = exact(problem, q, kv, plan)
    assert close(out[: len(expected)], expected, dtype)


@pytest.mark.parametrize("count", [20, 50])
def test_the_tiles_of_many_rows(count):
    rows = [(1, 1 + 37 * i % 290) for i in range(count)]
    problem, q, kv, plan, padded = attention_case(SHAPES[0], torch.float16, rows, pad_rows=2)
    few, many = (triton_attention.decode_tiles(problem, number) for number in (1, count))
    assert few != many and few.m == many.m
    out = triton_attention.bind(problem)(q, kv, padded)
    assert close(out, exact(problem, q, kv, plan), torch.float16)


@pytest.mark.parametrize("per_sm", [1, 40])
def test_splits_do_not_show(per_sm, monkeypatch):
    """KRN-09, REG-036: one split a row or many, of rows shorter and longer than a split."""
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_TOKENS", 32)
    monkeypatch.setattr(triton_attention, "PROGRAMS_PER_SM", per_sm)
    rows = [(1, length) for length in (1, 31, 32, 33, 128, 700)]
    problem, q, kv, plan, _ = attention_case((4, 2, 32, 16, None, None), FP32, rows)
    out = triton_attention.bind(problem)(q, kv, plan)
    assert close(out, exact(problem, q, kv, plan), FP32)


def test_one_plan_serves_every_layer_and_the_next_step():
    """The list of splits is made by the first layer, and anew when the lengths have changed in place."""
    problem, q, kv, plan, _ = attention_case((4, 2, 32, 16, None, None), FP32, [(1, 90), (1, 400)])
    layers = [triton_attention.bind(problem) for _ in range(3)]
    for lengths in ((90, 400), (17, 203), (1, 390)):
        plan.kv_len_R.copy_(torch.tensor(lengths))
        plan.host_kv_len[:] = lengths
        expected = exact(problem, q, kv, plan)
        for layer in layers:
            assert close(layer(q, kv, plan), expected, FP32)


def test_nan_in_one_row_touches_no_other():
    problem, q, kv, plan, _ = attention_case(
        (4, 2, 32, 4, None, None), FP32, [(1, 11), (1, 20), (6, 6)]
    )
    attend = triton_attention.bind(problem)
    clean = attend(q, kv, plan)
    kv[plan.block_table_RB[1, 2].item()] = NAN
    out = attend(q, kv, plan)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, *range(2, 8)]], clean[[0, *range(2, 8)]])


def test_scores_beyond_the_range_of_exp_stay_finite():
    problem, q, kv, plan, _ = attention_case((2, 2, 16, 16, None, None), FP32, [(1, 100), (70, 70)])
    kv = kv.nan_to_num() * 50
    out = triton_attention.bind(problem)(q * 200, kv, plan)
    assert out.isfinite().all()
    torch.testing.assert_close(out, exact(problem, q * 200, kv, plan), atol=0.5, rtol=2e-3)


# Decodes cut into splits, few queries, a prompt: the first half of some rows is empty.
PARTIAL = {
    "few": [(1, 150), (1, 12), (3, 3), (2, 70), (4, 90)],
    "prompts": [(1, 150), (1, 12), (3, 3), (40, 95), (2, 70)],
}
PARTIAL_BOUND = {FP32: 2e-5, FP16: 4e-3, BF16: 2e-2}


@pytest.mark.parametrize("rows", PARTIAL.values(), ids=PARTIAL)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 64, 16, None, None), (7, 1, 24, 8, None, 5.0)])
def test_halves_merge_to_the_whole(shape, sinks, rows, monkeypatch):
    """KRN-01, KRN-09: log-sum-exps of rows of one split and of several."""
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_TOKENS", 32)
    for dtype in DTYPES[:1] if sinks else DTYPES:
        problem, q, kv, plan, _ = attention_case(shape, dtype, rows)
        problem = replace(problem, sinks=sinks)
        sinks_H = torch.linspace(-1, 3, shape[0], device=DEVICE) if sinks else None
        check_merged(
            triton_attention.bind, triton_merge_attention.bind, problem, q, kv, plan,
            bound=PARTIAL_BOUND[dtype], sinks_H=sinks_H,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, head_dim", [(9, 20), (4, 128)])
def test_merged_attention_equals_the_formula(dtype, heads, head_dim):
    problem = MergeAttentionProblem(device=DEVICE, dtype=dtype, heads=heads, head_dim=head_dim)
    bound = {FP32: 1e-6, FP16: 1e-3, BF16: 1e-2}[dtype]
    check_merge(triton_merge_attention.bind(problem), problem, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, queries",
    [
        ((4, 2, 64, 16, None, None), 5),
        ((4, 1, 64, 16, 40, None), 16),
        ((7, 1, 16, 7, None, 3.0), 9),
        ((2, 2, 96, 4, None, None), 16),
    ],
)
def test_rows_with_few_queries_are_the_decode_kernels(dtype, shape, queries, monkeypatch):
    """As when drafts are verified: every row a few queries, each causal, long rows cut into splits;
    padding rows have none. Lengths are the device's: only the largest count is the host's."""
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_TOKENS", 32)
    rows = [(1, 100), (1, 1), (queries, 150), (2, 2), (3, 40), (queries, queries)]
    problem, q, kv, plan, padded = attention_case(shape, dtype, rows, pad_rows=2, pad_tokens=3)
    padded = replace(padded, max_query_len=queries)
    assert triton_attention.few_queries_tiles(problem, padded) is not None
    out, expected = triton_attention.bind(problem)(q, kv, padded), exact(problem, q, kv, plan)
    assert close(out[: len(expected)], expected, dtype)


def test_more_queries_than_a_tile_holds_are_the_prefill_kernels():
    problem, q, kv, plan, _ = attention_case((16, 1, 32, 16, None, None), FP32, [(1, 9), (9, 30)])
    assert triton_attention.few_queries_tiles(problem, plan) is None
    assert close(triton_attention.bind(problem)(q, kv, plan), exact(problem, q, kv, plan), FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 40, 128, 1000])
def test_norms_equal_the_reference(dtype, width):
    problem = rms_norm.RMSNormProblem(device=DEVICE, dtype=dtype, width=width, eps=1e-6)
    weight = random(width)
    x, residual = (random(6, 4, width, seed=seed).to(dtype) for seed in (1, 2))
    ours, theirs = triton_rms_norm.bind_norm(problem, weight), rms_norm.bind_norm(problem, weight)
    for view in (x, x[:, 1:3], x[::2], x[0], x[0, 0]):
        assert close(ours(view), theirs(view), dtype)
    left, right = residual[0].clone(), residual[0].clone()
    y = triton_rms_norm.bind_add_norm(problem, weight)(x[0], left)
    assert close(y, rms_norm.bind_add_norm(problem, weight)(x[0], right), dtype)
    assert close(left, right, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, heads, bias", [(3, 1, True), (40, 4, False), (1000, 1, False)])
def test_layer_norms_equal_the_reference(dtype, width, heads, bias):
    problem = layer_norm.LayerNormProblem(
        device=DEVICE, dtype=dtype, width=width, eps=1e-6, bias=bias, heads=heads
    )
    weights = random(heads, width), random(width, seed=3) if bias else None
    x, residual = (2 + random(6, 4, width, seed=seed).to(dtype) for seed in (1, 2))
    ours = triton_layer_norm.bind_norm(problem, *weights)
    theirs = layer_norm.bind_norm(problem, *weights)
    for view in (x, x[::2], *((x[:, 1:3], x[0], x[0, 0]) if heads == 1 else ())):
        assert close(ours(view), theirs(view), dtype)
    if heads == 1:
        left, right = residual[0].clone(), residual[0].clone()
        y = triton_layer_norm.bind_add_norm(problem, *weights)(x[0], left)
        assert close(y, layer_norm.bind_add_norm(problem, *weights)(x[0], right), dtype)
        assert close(left, right, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", triton_activation.ACTIVATIONS)
def test_activation_equals_the_reference(dtype, activation):
    problem = activation_op.ActivationProblem(device=DEVICE, dtype=dtype, activation=activation)
    x = 4 * random(3, 1100).to(dtype)
    x[1, 7] = NAN
    ours = triton_activation.bind(problem)(x)
    theirs = activation_op.bind_reference(problem)(x)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert close(ours.nan_to_num(), theirs.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", triton_gated_act.ACTIVATIONS)
def test_gated_activation_equals_the_reference(dtype, activation):
    problem = gated_act.GatedActProblem(
        device=DEVICE, dtype=dtype, width=1100, activation=activation
    )
    x = 4 * random(3, 2400).to(dtype)
    x[1, 7] = NAN
    ours = triton_gated_act.bind(problem)(x[:, 100:2300])
    theirs = gated_act.bind_reference(problem)(x[:, 100:2300])
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert close(ours.nan_to_num(), theirs.nan_to_num(), dtype)


@pytest.mark.parametrize("spread", [1, 5])
def test_a_gate_stands_for_several_values(spread):
    problem = gated_norm.GatedNormProblem(
        device=DEVICE, dtype=torch.float32, width=300, group=0, gate="sigmoid", spread=spread
    )
    x, gate = random(3, 307)[:, :300], random(3, 310)[:, : 300 // spread]
    ours = triton_gated_norm.bind(problem, None)(x, gate)
    assert close(ours, gated_norm.bind_reference(problem, None)(x, gate), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", gated_norm.GATES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("width", "group"), [(1100, 0), (40, 40), (84, 21)])
def test_gated_norm_equals_the_reference(dtype, gate, norm_first, width, group):
    problem = gated_norm.GatedNormProblem(
        device=DEVICE, dtype=dtype, width=width, group=group, eps=1e-5, gate=gate, norm_first=norm_first
    )  # fmt: skip
    weight = random(width) if group else None
    both = 3 * random(3, 2 * width + 5).to(dtype)
    x, opened = both[:, :width].contiguous(), both[:, width : 2 * width]
    ours = triton_gated_norm.bind(problem, weight)(x, opened)
    assert close(ours, gated_norm.bind_reference(problem, weight)(x, opened), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize(
    "head_dim, rotary, layout",
    [(64, 64, "half"), (80, 32, "half"), (24, 6, "pairs"), (32, 0, "half")],
)
def test_norm_rotation_and_write_in_one(dtype, eps, head_dim, rotary, layout):
    """KRN-08, REG-035."""
    problem = qk_rope_write.QKRopeWriteProblem(
        device=DEVICE, dtype=dtype, heads=6, kv_heads=2, head_dim=head_dim, block_tokens=4,
        rotary_dim=rotary, layout=layout, eps=eps,
    )  # fmt: skip
    kernel = triton_qk_rope_write.KERNEL
    assert kernel.supports(problem) is None
    assert qk_rope_write.OP.error(kernel, problem) <= BOUND[dtype]


GEMV = GemmPlan(kernel="gemv", n=4, k=64, warps=4, prefetch=1)
SKINNY = GemmPlan(kernel="skinny", n=16, k=32, warps=4, prefetch=2)
SPLIT = GemmPlan(kernel="skinny", n=32, k=32, warps=4, split=3)
SWAPPED = GemmPlan(kernel="skinny", n=64, k=64, warps=4, stages=4, split=2, swap=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "plan, tokens", [(GEMV, 1), (SKINNY, 3), (SPLIT, 1), (SPLIT, 17), (SWAPPED, 1), (SWAPPED, 17)]
)
@pytest.mark.parametrize(
    "outputs, inputs, bias, eps, activation, add",
    [
        (48, 64, False, None, None, False),
        (96, 136, True, 1e-5, "silu", False),
        (40, 264, True, None, None, True),
        (128, 200, False, None, "gelu_tanh", False),
    ],
)
def test_small_products(dtype, plan, tokens, outputs, inputs, bias, eps, activation, add):
    """KRN-20, KRN-22: twice the same bits, whichever program of a split comes last."""
    problem = fused_linear.FusedLinearProblem(
        device=DEVICE, dtype=dtype, inputs=inputs, outputs=outputs, bias=bias,
        eps=eps if plan is GEMV else None, activation=activation, add=add,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    weight = values(outputs, inputs) / inputs**0.5
    bias_O = values(outputs) if bias else None
    norm = values(inputs).float() if problem.eps else None
    x, residual = values(tokens, inputs), values(tokens, problem.results) if add else None
    expected = fused_linear.bind_reference(problem, weight, bias_O, norm)(
        x, None if residual is None else residual.clone()
    )
    product = Gemm(
        weight_OI=weight, bias_O=bias_O, norm_I=norm, eps=problem.eps or 0.0,
        activation=activation or "", add=add,
    )  # fmt: skip
    run = launcher(product, plan, 1 << (tokens - 1).bit_length())
    results = []
    for _ in range(2):
        y = torch.full((tokens, problem.results), NAN, device=DEVICE, dtype=dtype)
        if residual is not None:
            y.copy_(residual)
        run(x, y)
        results.append(y)
    assert close(results[0], expected, dtype)
    assert torch.equal(*results)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_fused_layer_takes_any_number_of_tokens(tokens):
    problem = fused_linear.FusedLinearProblem(
        device=DEVICE, dtype=FP32, inputs=64, outputs=96, eps=1e-5, activation="silu"
    )
    weights = random(96, 64) / 8, None, random(64, seed=1).abs()
    x = random(tokens, 64, seed=2)
    ours = triton_fused_linear.KERNEL.bind(problem, *weights)(x)
    assert close(ours, fused_linear.bind_reference(problem, *weights)(x), FP32)


@pytest.mark.parametrize("tokens", [1, 3, *([] if interpreted() else [100, 700])])
def test_sums_of_wide_results_are_not_rounded_to_the_type_of_inputs(tokens: int):
    """MOD-01: routers and heads; steps of a few tokens by our kernels, others by the library."""
    dtype = FP16 if interpreted() else BF16
    generator = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(size, 512, generator=generator) for size in (48, tokens))
    weight, x = weight.to(DEVICE, dtype), x.to(DEVICE, dtype)
    problem = LinearProblem(device=DEVICE, dtype=dtype, inputs=512, outputs=48, wide=True)
    ours = triton_linear.bind(problem, weight, None)(x)
    assert ours.dtype == FP32
    assert close(ours, x.float() @ weight.float().T, FP32)


@pytest.mark.parametrize("dtype", [FP32, torch.float16])
def test_greedy_takes_the_first_of_the_greatest(dtype):
    x = random(8, 9001, device="cpu").to(dtype)
    x[1, [700, 800]] = NAN
    x[2, [8900, 31]] = 9.0
    x[3] = -INF
    x[4], x[4, 5] = -0.0, 0.0
    x[5, 17] = INF
    x[6], x[6, 8999:] = -2.0, -1.0
    token, value = triton_greedy.bind(greedy.GreedyProblem(device=DEVICE))(x.to(DEVICE))
    expected = greedy.OP.reference.bind(greedy.GreedyProblem(device="cpu"))(x)
    assert torch.equal(token.cpu(), expected[0])
    assert torch.equal(value.cpu().nan_to_num(7.5), expected[1].nan_to_num(7.5))


def test_the_draw_is_the_references():
    """ENG-25: the noise is the same on every device."""
    logits = 3 * random(6, 5003, device="cpu")
    logits[3] = -INF
    logits[4], logits[4, 77] = -INF, -3.0
    temperature = torch.linspace(0.1, 2.0, 6, dtype=torch.float64)
    keys = torch.randint(-(1 << 62), 1 << 62, (6,), generator=torch.Generator().manual_seed(1))
    ours = triton_gumbel.bind(gumbel.GumbelProblem(device=DEVICE))(
        logits.to(DEVICE), temperature.to(DEVICE), keys.to(DEVICE)
    )
    theirs = gumbel.bind_reference(gumbel.GumbelProblem(device="cpu"))(logits, temperature, keys)
    assert torch.equal(ours[0].cpu(), theirs[0]) and torch.equal(ours[1].cpu(), theirs[1])


@pytest.mark.skipif(interpreted(), reason="graphs are of GPUs")
@pytest.mark.parametrize("decode_only", [True, False])
def test_a_captured_graph_serves_every_step_of_its_shape(decode_only):
    slots, capacity, tokens = 24, 64, 24 if decode_only else 512
    shape = (16, 8, 128, 16, None, None)
    problem, _, kv, full, _ = attention_case(shape, BF16, [(1, capacity * 16)] * slots)
    q = random(tokens, 16, 128).to(BF16)
    plan = replace(
        full, max_query_len=1 if decode_only else tokens, host_kv_len=None, host_query_start=None
    )
    layers = [triton_attention.bind(problem) for _ in range(2)]
    for layer in layers:
        layer(q, kv, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer(q, kv, plan) for layer in layers]
    generator = torch.Generator().manual_seed(5)

    def below(limit: int) -> int:
        return int(torch.randint(1, limit, (), generator=generator))

    for count in (24, 1, 7, 13):
        lengths = [below(capacity * 16) for _ in range(count)]
        queries = [1 if decode_only else min(length, below(20)) for length in lengths]
        starts = torch.tensor([0, *queries] + [0] * (slots - count)).cumsum(0).int()
        plan.query_start_R1.copy_(starts)
        plan.kv_len_R.copy_(torch.tensor(lengths + [0] * (slots - count)).int())
        graph.replay()
        told = replace(
            plan,
            query_start_R1=plan.query_start_R1[: count + 1],
            kv_len_R=plan.kv_len_R[:count],
            block_table_RB=plan.block_table_RB[:count],
            host_query_start=starts.numpy()[: count + 1],
            host_kv_len=plan.kv_len_R.cpu().numpy()[:count],
            num_decodes=0,
            max_kv_len=max(lengths),
        )
        expected = exact(problem, q, kv, told)
        for out in outs:
            assert close(out[: len(expected)], expected, BF16)
