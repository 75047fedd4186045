"""A KV cache of codes, written and read by Triton kernels, and attention sinks: in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention import triton_attention
from headrace.back.kernels.kv_write import op as kv_write
from headrace.back.kernels.kv_write import triton_kv_write
from headrace.back.kernels.kv_write.quantized import (
    dequantize,
    quantize,
    value_bytes,
    values_and_scales,
)
from headrace.back.kernels.merge_attention import triton_merge_attention
from headrace.back.kernels.qk_rope_write import op as qk_rope_write
from headrace.back.kernels.qk_rope_write import triton_qk_rope_write
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.partial_attention import check_merged
from tests.kernels.triton.test_kernels import (
    DEVICE,
    DTYPES,
    FP32,
    INF,
    NAN,
    attention_case,
    close,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
CODES = ["int8", "fp8"]
ROWS = [(1, 1), (1, 37), (1, 300), (3, 3), (40, 95), (2, 130)]


def quantized_cache(kv: torch.Tensor, code: str) -> torch.Tensor:
    """The cache `kv` [N, 2, K, B, D] in codes; what is NaN there has the scale NaN here."""
    shape = (*kv.shape[:4], value_bytes(kv.shape[4], code) + 4)
    cache = torch.zeros(shape, dtype=torch.int8, device=kv.device)
    codes, scales = values_and_scales(cache)
    made = quantize(kv, code)
    codes.copy_(made[0])
    scales.copy_(made[1])
    return cache


def in_codes(problem, kv, code):
    """The problem over such codes, their cache, and what that means in float32; unused codes are e4m3's NaN, their
    scales NaN. None: as they are."""
    if code is None:
        return problem, kv, kv
    cache = quantized_cache(kv, code)
    codes, scales = values_and_scales(cache)
    codes[scales.isnan()] = 0x7F
    return replace(problem, quantized=code), cache, dequantize(cache, FP32, code)


# heads, KV heads, head_dim, block_tokens, window, soft cap
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "shape", [(4, 2, 64, 16, None, None), (8, 2, 96, 4, 20, 5.0), (2, 1, 128, 16, None, None)]
)
def test_attention_over_a_quantized_cache_equals_the_reference(dtype, code, shape):
    """QNT-18. Scales of unused places are NaN."""
    problem, q, kv, plan, padded = attention_case(shape, dtype, ROWS, pad_rows=2, pad_tokens=3)
    problem, cache = replace(problem, quantized=code), quantized_cache(kv, code)
    assert triton_attention.KERNEL.supports(problem) is None
    out = triton_attention.bind(problem)(q, cache, padded)
    wide = attention.OP.reference.bind(replace(problem, dtype=FP32, quantized=None))
    tokens = int(plan.query_start_R1[-1])
    expected = wide(q[:tokens].float(), dequantize(cache, FP32, code), plan)
    assert close(out[:tokens], expected, dtype)


@pytest.mark.parametrize("code", CODES)
def test_halves_of_a_quantized_cache_merge_to_the_whole(code):
    rows = [(1, 150), (1, 12), (3, 3), (40, 95), (2, 70)]
    problem, q, kv, plan, _ = attention_case((4, 2, 64, 16, None, None), DTYPES[-1], rows)
    check_merged(
        triton_attention.bind, triton_merge_attention.bind, replace(problem, quantized=code), q,
        quantized_cache(kv, code), plan, bound=2e-2,
    )  # fmt: skip


def test_a_lost_token_of_a_quantized_cache_shows_in_its_row_alone():
    problem, q, kv, plan, _ = attention_case(
        (4, 2, 32, 16, None, None), FP32, [(1, 11), (1, 20), (6, 6)]
    )
    attend = triton_attention.bind(replace(problem, quantized="int8"))
    clean = attend(q, quantized_cache(kv, "int8"), plan)
    kv[plan.block_table_RB[1, 0].item(), :, :, 2, 5] = INF
    out = attend(q, quantized_cache(kv, "int8"), plan)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, *range(2, 8)]], clean[[0, *range(2, 8)]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "head_dim, rotary, layout, eps", [(64, 64, "half", 1e-5), (80, 32, "pairs", None)]
)
def test_quantized_values_are_written_with_norm_and_rotation(
    dtype, code, head_dim, rotary, layout, eps
):
    """KRN-08, QNT-18."""
    problem = qk_rope_write.QKRopeWriteProblem(
        device=DEVICE, dtype=dtype, heads=6, kv_heads=2, head_dim=head_dim, block_tokens=4,
        rotary_dim=rotary, layout=layout, eps=eps, quantized=code,
    )  # fmt: skip
    kernel = triton_qk_rope_write.KERNEL
    assert kernel.supports(problem) is None
    assert qk_rope_write.OP.error(kernel, problem) <= qk_rope_write.OP.tolerance(problem)


def test_scales_that_are_fixed_are_written():
    """QNT-13."""
    problem = qk_rope_write.QKRopeWriteProblem(
        device=DEVICE, dtype=FP32, heads=6, kv_heads=2, head_dim=80, block_tokens=4,
        rotary_dim=32, eps=1e-5, quantized="fp8", fixed=True,
    )  # fmt: skip
    kernel = triton_qk_rope_write.KERNEL
    assert kernel.supports(problem) is None
    assert qk_rope_write.OP.error(kernel, problem) <= qk_rope_write.OP.tolerance(problem)


@pytest.mark.parametrize("code", CODES)
def test_written_values_are_the_quantizers_and_losses_are_seen(code):
    """Without norm and rotation nothing is rounded before: the same codes and scales, bit for bit."""
    problem = qk_rope_write.QKRopeWriteProblem(
        device=DEVICE, dtype=FP32, heads=2, kv_heads=2, head_dim=48, block_tokens=4, rotary_dim=0,
        quantized=code,
    )  # fmt: skip
    qkv = torch.randn(5, 6 * 48, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    qkv[1, 2 * 48 + 3], qkv[2, 3 * 48] = NAN, -INF
    qkv[3, 4 * 48 : 5 * 48] = 0.0
    slots = torch.tensor([4, 7, 9, 10, 15], device=DEVICE)
    caches = [torch.zeros(4, 2, 2, 4, 52, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    positions, table = torch.zeros_like(slots), torch.zeros(1, 0, device=DEVICE)
    for bind, cache in zip(
        (triton_qk_rope_write.bind, qk_rope_write.bind_reference), caches, strict=True
    ):
        bind(problem, None, None)(qkv.clone(), positions, table, cache, slots)
    (ours, our_scales), (theirs, their_scales) = map(values_and_scales, caches)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_scales.nan_to_num(7.0), their_scales.nan_to_num(7.0))
    assert our_scales.isnan().sum() == 2


NARROW_FORMS = pytest.mark.parametrize(
    "form",
    [
        *("nvfp4", "nvfp4-4over6", "int3-rotated", "turboquant-4bit"),
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("int4", "int4-rotated", "turboquant-3bit")
        ),
    ],
)


@NARROW_FORMS
@pytest.mark.parametrize("head_dim", [pytest.param(128, marks=pytest.mark.slow), 32])
def test_numbers_of_less_than_a_byte_are_the_quantizers_bit_for_bit(form, head_dim):
    """QNT-18. Also of zeros, of ties and of what float16 does not hold; a lost head's scale is NaN."""
    problem = kv_write.KVWriteProblem(
        device=DEVICE, dtype=FP32, kv_heads=2, head_dim=head_dim, block_tokens=4, quantized=form
    )
    x = torch.randn(2, 6, 2, head_dim, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    x[0, 1], x[1, 2] = 0.0, (torch.arange(head_dim) % 13 - 6) / 2
    x[0, 3, 0, 7], x[1, 3, 1, 0], x[0, 4, 1] = NAN, -INF, 1e30
    slots = torch.tensor([4, 7, 9, 10, 13, 15], device=DEVICE)
    shape = (4, 2, 2, 4, value_bytes(head_dim, form) + 4)
    caches = [torch.zeros(shape, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    for kernel, cache in zip((triton_kv_write.KERNEL, kv_write.OP.reference), caches, strict=True):
        assert kernel.supports(problem) is None
        kernel.bind(problem)(x[0], x[1], cache, slots)
    (ours, our_scales), (theirs, their_scales) = map(values_and_scales, caches)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_scales.nan_to_num(7.0), their_scales.nan_to_num(7.0))
    assert our_scales.isnan().sum() == (2 if form.startswith("nvfp4") else 3)


@NARROW_FORMS
def test_attention_over_numbers_of_less_than_a_byte_equals_the_reference(form):
    """QNT-18. Decodes, few queries and a prompt; scales of unused places are NaN."""
    problem, q, kv, plan, padded = attention_case(
        (4, 2, 32, 16, None, None), FP32, [(1, 37), (3, 3), (20, 40)], pad_rows=1, pad_tokens=2
    )
    problem, cache = replace(problem, quantized=form), quantized_cache(kv, form)
    assert triton_attention.KERNEL.supports(problem) is None
    out = triton_attention.bind(problem)(q, cache, padded)
    wide = attention.OP.reference.bind(replace(problem, quantized=None))
    tokens = int(plan.query_start_R1[-1])
    assert close(out[:tokens], wide(q[:tokens], dequantize(cache, FP32, form), plan), FP32)


def test_heads_that_are_no_power_of_two_stay_with_the_definition():
    problem = kv_write.KVWriteProblem(
        device=DEVICE, dtype=FP32, kv_heads=2, head_dim=80, block_tokens=4, quantized="int4"
    )
    assert "power of two" in triton_kv_write.KERNEL.supports(problem)
    shape = attention_case((4, 2, 80, 16, None, None), FP32, [(1, 3)])[0]
    assert "power of two" in triton_attention.KERNEL.supports(replace(shape, quantized="int4"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_sinks_take_their_share_once_a_query(dtype, window, monkeypatch):
    """Also where a row is cut into splits, which are many here."""
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_TOKENS", 32)
    monkeypatch.setattr(triton_attention, "PROGRAMS_PER_SM", 40)
    shape = (4, 2, 64, 16, window, None)
    problem, q, kv, plan, padded = attention_case(shape, dtype, ROWS, pad_rows=2)
    problem = replace(problem, sinks=True)
    sinks_H = torch.tensor([-2.0, 0.0, 3.0, 30.0], device=DEVICE)
    out = triton_attention.bind(problem, sinks_H)(q, kv, padded)
    wide = attention.OP.reference.bind(replace(problem, dtype=FP32), sinks_H)
    assert close(out, wide(q.float(), kv.float(), plan), dtype)
