"""One call of every Triton kernel in each form that is compiled differently, on CPU tensors of small sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from headrace.back.kernels.activation import op as activation
from headrace.back.kernels.all_reduce.triton_all_reduce import PeerSums
from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.causal_conv import op as causal_conv
from headrace.back.kernels.compressed_attention import op as compressed
from headrace.back.kernels.expanded_attention import op as expanded_attention
from headrace.back.kernels.experts import op as experts
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.kernels.fused_route import op as fused_route
from headrace.back.kernels.gated_act import op as gated_act
from headrace.back.kernels.gated_delta import op as gated_delta
from headrace.back.kernels.gated_norm import op as gated_norm
from headrace.back.kernels.gated_scan.op import StateTrail
from headrace.back.kernels.greedy import op as greedy
from headrace.back.kernels.group_select import op as group_select
from headrace.back.kernels.group_write import op as group_write
from headrace.back.kernels.gumbel import op as gumbel
from headrace.back.kernels.head_linear import op as head_linear
from headrace.back.kernels.index_select import op as index_select
from headrace.back.kernels.index_write import op as index_write
from headrace.back.kernels.kv_write import op as kv_write
from headrace.back.kernels.kv_write.triton_narrow_write import NARROW
from headrace.back.kernels.latent_attention import op as latent_attention
from headrace.back.kernels.latent_write import op as latent_write
from headrace.back.kernels.layer_norm import op as layer_norm
from headrace.back.kernels.linear.table import GemmPlan
from headrace.back.kernels.linear.triton_fixed import fixed
from headrace.back.kernels.linear.triton_small import Gemm, launcher
from headrace.back.kernels.linear_fp8 import op as linear_fp8
from headrace.back.kernels.linear_int4 import op as linear_int4
from headrace.back.kernels.linear_int4 import stream as linear_int4_stream
from headrace.back.kernels.linear_int8 import op as linear_int8
from headrace.back.kernels.logit_masks import op as logit_masks
from headrace.back.kernels.lora_embedding import op as lora_embedding
from headrace.back.kernels.lora_linear import op as lora_linear
from headrace.back.kernels.merge_attention import op as merge_attention
from headrace.back.kernels.ngram_draft import op as ngram_draft
from headrace.back.kernels.nucleus import op as nucleus
from headrace.back.kernels.op import Kernel, Op, load_kernel
from headrace.back.kernels.patch_places import op as patch_places
from headrace.back.kernels.penalties import op as penalties
from headrace.back.kernels.position_shift import op as position_shift
from headrace.back.kernels.qk_rope_write import op as qk_rope_write
from headrace.back.kernels.rms_norm import op as rms_norm
from headrace.back.kernels.rope import op as rope
from headrace.back.kernels.route import op as route
from headrace.back.kernels.sample import op as sample
from headrace.back.kernels.span_attention import op as span_attention
from headrace.back.kernels.sparse_attention import op as sparse_heads
from headrace.back.kernels.sparse_latent_attention import op as sparse
from headrace.back.kernels.ssd_scan import op as ssd_scan
from headrace.back.kernels.state_return import op as state_return
from headrace.back.kernels.state_rows import op as state_rows
from headrace.back.kernels.step_commit import op as step_commit
from headrace.back.kernels.step_inputs import op as step_inputs
from headrace.back.kernels.step_verify import op as step_verify
from headrace.back.kernels.token_scores import op as token_scores
from tests.kernels.recurrent_cases import problem_of

BF16, FP32 = torch.bfloat16, torch.float32


def _call(op: Op, kernel: str, problem: object) -> Callable[[], object]:
    def call() -> object:
        loaded = load_kernel(f"headrace.back.kernels.{kernel}")
        assert isinstance(loaded, Kernel), loaded
        sample = op.sample(problem)
        return loaded.bind(sample.problem, *sample.weights)(*sample.arguments)

    return call


def _attention(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = BF16, **more: object
) -> object:
    return attention.AttentionProblem(
        device="cpu", dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        block_tokens=16, scale=head_dim**-0.5, **more,
    )  # fmt: skip


def _many_adapted() -> object:
    """Adapters of rows in tiles."""
    from headrace.back.kernels.lora_linear import triton_lora_linear

    problem = lora_linear.LoraLinearProblem(
        device="cpu", dtype=BF16, inputs=512, parts=(256, 64), rank=16, slots=4, turned=True
    )
    add = triton_lora_linear.bind(problem, lora_linear.sample_weights(problem))
    return add(*lora_linear.sample_rows(problem, 100))


def _hopper() -> object:
    """The kernel that no other device has."""
    from headrace.back.kernels.attention import hopper

    for problem in (
        _attention(32, 8, 128),
        _attention(32, 8, 128, quantized="fp8"),
        _attention(14, 2, 64, quantized="int8"),
    ):
        q_THD, kv, plan = attention.OP.sample(problem).arguments
        hopper.bind_prefill(problem, min_queries=2)(q_THD, kv, plan, torch.empty_like(q_THD), None)
    return None


def _hopper_variants() -> object:
    """The same with windows, chunks, soft caps, sinks and heads of 256, and of longer rows."""
    from headrace.back.kernels.attention import hopper

    for problem in (
        _attention(32, 8, 128, window=512),
        _attention(40, 8, 128, chunk=8192),
        _attention(64, 8, 64, window=128, sinks=True),
        _attention(8, 4, 256, window=4096, softcap=50.0),
        _attention(16, 4, 256),
    ):
        q_THD, kv, plan = attention.OP.sample(problem).arguments
        sinks_H = torch.zeros(problem.heads) if problem.sinks else None
        for short in {hopper.tiles_for(problem, 1, n).n: n for n in (0, 2048)}.values():
            run = hopper.bind_prefill(problem, sinks_H, min_queries=2, short_tokens=short)
            run(q_THD, kv, plan, torch.empty_like(q_THD), None)
    return None


def _hopper_decode() -> object:
    """The same of rows with one query: with other rows' prefixes and without."""
    from headrace.back.kernels.attention import hopper_decode
    from headrace.back.kernels.attention.cascade import NONE, PrefixResults

    rows = torch.zeros(4 * 4, dtype=torch.int32)
    shared = PrefixResults(joins=rows, partial=torch.zeros(64), m=128)
    for problem, common in (
        (_attention(32, 8, 128), NONE),
        (_attention(16, 8, 128), shared),
        (_attention(14, 2, 64), NONE),
        (_attention(32, 8, 128, quantized="fp8"), NONE),
        (_attention(16, 8, 64, quantized="int8"), shared),
    ):
        q_THD, kv, plan = attention.OP.sample(problem).arguments
        decode = hopper_decode.bind_decode(problem)
        decode(q_THD, kv, plan, torch.empty_like(q_THD), None, common)
    return None


def _hopper_few_queries() -> object:
    """The same of rows that verify drafts."""
    from headrace.back.kernels.attention import hopper_decode, triton_plans
    from headrace.back.kernels.attention.cascade import NONE

    for problem, queries, rows in (
        (_attention(32, 8, 128), 4, 8),
        (_attention(32, 8, 128), 16, 64),
        (_attention(14, 2, 64), 8, 8),
        (_attention(32, 8, 128, quantized="fp8"), 8, 64),
        (_attention(16, 8, 64, quantized="int8"), 2, 8),
    ):
        step = triton_plans.few_queries(problem, rows=rows, queries=queries)
        q_THD, kv, plan = triton_plans.sample(problem, step).arguments
        decode = hopper_decode.bind_decode(problem, queries)
        decode(q_THD, kv, plan, torch.empty_like(q_THD), None, NONE)
    return None


def _hopper_lse() -> object:
    """Both Hopper kernels where log-sum-exps are asked for."""
    from headrace.back.kernels.attention import hopper, hopper_decode
    from headrace.back.kernels.attention.cascade import NONE

    for quantized in (None, "int8"):
        problem = _attention(32, 8, 128, quantized=quantized)
        q_THD, kv, plan = attention.OP.sample(problem).arguments
        out_THD, lse_TH = torch.empty_like(q_THD), torch.empty(q_THD.shape[:2])
        hopper.bind_prefill(problem, min_queries=2)(q_THD, kv, plan, out_THD, lse_TH)
        hopper_decode.bind_decode(problem)(q_THD, kv, plan, out_THD, lse_TH, NONE)
    return None


def _lse(kernel: str, problem: object, step: int = 0) -> Callable[[], object]:
    """One of the sample's steps, with log-sum-exps."""

    def call() -> object:
        loaded = load_kernel(f"headrace.back.kernels.{kernel}")
        assert isinstance(loaded, Kernel), loaded
        sample = attention.OP.sample(problem)
        q_THD, kv, plan = (sample.arguments, *sample.further)[step]
        return loaded.bind(problem, *sample.weights)(q_THD, kv, plan, torch.empty(q_THD.shape[:2]))

    return call


def _few_queries() -> object:
    """Steps of rows with few queries each."""
    from headrace.back.kernels.attention import triton_plans

    for problem, queries in (
        (_attention(32, 8, 128), 4),
        (_attention(32, 8, 128), 16),
        (_attention(14, 2, 64, quantized="int8"), 8),
    ):
        bound = load_kernel(f"headrace.back.kernels.{_ATTENTION}").bind(problem)
        step = triton_plans.few_queries(problem, queries=queries)
        bound(*triton_plans.sample(problem, step).arguments)
    return None


def _fixed_decodes() -> object:
    """The small tile of deterministic mode, which only some devices take."""
    from headrace.back.kernels.attention.triton_fixed import FixedAttentionTile, bind

    problem = _attention(32, 8, 128)
    tile = FixedAttentionTile(m=16, n=64, warps=2, stages=2)
    return bind(problem, tile=tile)(*attention.OP.sample(problem).arguments)


def _sparse_by_steps() -> object:
    """Lists in parts, and the tiles of many tokens."""
    from headrace.back.kernels.sparse_latent_attention.triton_sparse_latent import bind_by_steps

    problem = replace(SPARSE_LATENT, heads=128)
    attend = bind_by_steps(problem)
    sample = sparse.OP.sample(problem)
    for one in (sample.arguments, *sample.further):
        attend(*one)
    return None


def _quantized_latents(form: str) -> Callable[[], object]:
    """Written, and read whole and by choice."""

    def call() -> object:
        write, attend, chosen = (
            replace(problem, quantized=form) for problem in (LATENT_WRITE, LATENT, SPARSE_LATENT)
        )
        _call(latent_write.OP, "latent_write.triton_latent_write:KERNEL", write)()
        _call(latent_attention.OP, "latent_attention.triton_latent:KERNEL", attend)()
        return _call(sparse.OP, "sparse_latent_attention.triton_sparse_latent:KERNEL", chosen)()

    return call


def _index_select_parts() -> object:
    """Long rows of few tokens."""
    from headrace.back.kernels.index_select.triton_index_select import PART, bind

    sample = index_select.sample_of(INDEX, [[(1, 2 * PART + 900), (1, 1)]])
    return bind(INDEX)(*sample.arguments)


def _experts_hopper(**more: bool) -> object:
    """Each regime."""
    from headrace.back.kernels.experts import triton_hopper

    problem = replace(EXPERTS, **more)
    for plan in triton_hopper.PLANS:
        sample = triton_hopper.sample_of(problem, plan.m + 2)
        triton_hopper.bind(sample.problem, *sample.weights, always=plan)(*sample.arguments)
    return None


def _experts_int4(form: object, **more: object) -> Callable[[], object]:
    """The tiles of any GPU; with `hopper` each plan of the kernels of Hopper."""

    def call() -> object:
        from headrace.back.kernels.experts_int4 import op, triton_experts_int4

        facts = dict(more)
        plans = triton_experts_int4.PLANS if facts.pop("hopper", False) else (None,)
        mixture = experts.ExpertsProblem(
            device="cpu", dtype=BF16, experts=32, slots=4, width=448, inner=320, **facts
        )
        problem = op.ExpertsInt4Problem(mixture=mixture, form=form)
        for plan in plans:
            sample = op.sample_of(problem, ((plan.m if plan else 3) + 2,))
            triton_experts_int4.bind(sample.problem, *sample.weights, always=plan)(
                *sample.arguments
            )
        return None

    return call


def _experts_bytes(form: object, **more: object) -> Callable[[], object]:
    """Each plan."""

    def call() -> object:
        from headrace.back.kernels.experts_bytes import op, triton_experts_bytes

        mixture = experts.ExpertsProblem(
            device="cpu", dtype=BF16, experts=32, slots=4, width=448, inner=320, **more
        )
        problem = op.ExpertsBytesProblem(mixture=mixture, form=form)
        for m in (16, 32, 64):
            sample = op.sample_of(problem, (m + 1,))
            triton_experts_bytes.bind(sample.problem, *sample.weights, always=m)(*sample.arguments)
        return None

    return call


def _experts_fp8(group: int | None, **more: object) -> Callable[[], object]:
    """Each plan; `hopper`: those of Hopper."""

    def call() -> object:
        from headrace.back.kernels.experts_fp8 import op, triton_experts_fp8

        facts = dict(more)
        plans = triton_experts_fp8.all_plans(streamed=bool(facts.pop("hopper", False)))
        fixed = bool(facts.pop("fixed", False))
        mixture = experts.ExpertsProblem(
            device="cpu", dtype=BF16, experts=32, slots=4, width=512, inner=384, **facts
        )
        problem = op.ExpertsFp8Problem(mixture=mixture, group=group, fixed=fixed)
        for plan in plans:
            sample = op.sample_of(problem, (plan.m + 1,))
            triton_experts_fp8.bind(sample.problem, *sample.weights, always=plan)(*sample.arguments)
        return None

    return call


def _latent_hopper() -> object:
    """The kernels of steps that only decode."""
    from headrace.back.kernels.latent_attention import triton_hopper

    for heads in (16, 128):
        problem = latent_attention.LatentAttentionProblem(
            device="cpu", dtype=BF16, heads=heads, rank=512, rotary=64, block_tokens=16, scale=0.1
        )
        q_THW, kv, plan = latent_attention.OP.sample(problem).further[-1]
        triton_hopper.bind(problem)(q_THW, kv, plan)
    return None


def _expanded_attention() -> object:
    from headrace.back.kernels.expanded_attention import triton_hopper

    problem = expanded_attention.ExpandedAttentionProblem(
        device="cpu", dtype=BF16, heads=16, own=128, values=128, rotary=64, scale=0.1
    )
    return triton_hopper.bind(problem)(*expanded_attention.OP.sample(problem).arguments)


def _latent_attention() -> object:
    """DeepSeek's sizes, with log-sum-exps."""
    from headrace.back.kernels.latent_attention import triton_latent

    q_THW, kv, plan = latent_attention.OP.sample(LATENT).arguments
    return triton_latent.bind(LATENT)(q_THW, kv, plan, torch.empty(q_THW.shape[:2]))


def _shared() -> object:
    """A step that looks for shared prefixes, with all the kernels that takes."""
    from headrace.back.kernels.attention import cascade

    with patch.multiple(cascade, LEAST_ROWS=1, MIN_TOKENS=16):
        return _call(attention.OP, _ATTENTION, _attention(32, 8, 128))()


def _qk(heads: int, kv_heads: int, head_dim: int, rotary: int, **more: object) -> object:
    return qk_rope_write.QKRopeWriteProblem(
        device="cpu", dtype=BF16, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        block_tokens=16, rotary_dim=rotary, **more,
    )  # fmt: skip


def _norm(width: int) -> object:
    return rms_norm.RMSNormProblem(device="cpu", dtype=BF16, width=width, eps=1e-6)


def _layer_norm(width: int, heads: int = 1) -> object:
    return layer_norm.LayerNormProblem(
        device="cpu", dtype=BF16, width=width, eps=1e-6, bias=heads == 1, heads=heads
    )


def _recurrent(case: str) -> Callable[[], object]:
    module, problem = problem_of(case, BF16)
    name = case.partition("-")[0]
    return _call(module.OP, f"{name}.triton_{name}:KERNEL", problem)


def _chunks(**more: object) -> Callable[[], object]:
    """The gated delta rule over chunks."""

    def call() -> object:
        sizes = {"key_heads": 4, "heads": 4, "key_dim": 128, "value_dim": 128}
        problem = gated_delta.GatedDeltaProblem(device="cpu", dtype=BF16, **sizes | more)
        sample = gated_delta.long_sample(problem)
        kernel = load_kernel("headrace.back.kernels.gated_delta.triton_chunks:KERNEL")
        return kernel.bind(problem, *sample.weights)(*sample.arguments)

    return call


def _conv_tiles() -> object:
    """A short convolution over tiles of tokens."""
    problem = causal_conv.CausalConvProblem(device="cpu", dtype=BF16, channels=8192, taps=4)
    sample = causal_conv.long_sample(problem)
    kernel = load_kernel("headrace.back.kernels.causal_conv.triton_tiles:KERNEL")
    return kernel.bind(problem, *sample.weights)(*sample.arguments)


def _ssd_chunks(head_dim: int, state_dim: int) -> Callable[[], object]:
    """Mamba 2's recurrence over chunks."""

    def call() -> object:
        sizes = {"heads": 4, "groups": 2, "head_dim": head_dim, "state_dim": state_dim}
        problem = ssd_scan.SsdScanProblem(device="cpu", dtype=BF16, **sizes)
        sample = ssd_scan.long_sample(problem)
        kernel = load_kernel("headrace.back.kernels.ssd_scan.triton_chunks:KERNEL")
        return kernel.bind(problem, *sample.weights)(*sample.arguments)

    return call


def _product(plan: GemmPlan, tokens: int, **more: object) -> Callable[[], object]:
    """A product of 4096 inputs and 512 results, with all there is around it."""
    gated = bool(more.get("activation"))
    weight = torch.zeros(1024 if gated else 512, 4096, dtype=BF16)
    product = Gemm(weight_OI=weight, **more)
    x, y = torch.zeros(tokens, 4096, dtype=BF16), torch.zeros(tokens, 512, dtype=BF16)
    return lambda: launcher(product, plan, tokens)(x, y)


def _fp8(group: int | None, tokens: int, **more: object) -> Callable[[], object]:
    """A layer with a weight of e4m3 numbers."""

    def call() -> object:
        from headrace.back.kernels.linear_fp8 import triton_linear_fp8

        problem = linear_fp8.LinearFp8Problem(
            device="cpu", dtype=BF16, outputs=1024, group=group, **{"inputs": 4096, **more}
        )
        sample = linear_fp8.sample_of(problem, (tokens,))
        return triton_linear_fp8.bind(sample.problem, *sample.weights)(*sample.arguments)

    return call


def _one_of_bytes(group: int | None, **more: object) -> Callable[[], object]:
    """A token times a weight of e4m3 numbers, by the kernel of Hopper."""

    def call() -> object:
        problem = linear_fp8.LinearFp8Problem(
            device="cpu", dtype=BF16, outputs=1024, inputs=4096, group=group, **more
        )
        sample = linear_fp8.sample_of(problem, (1,))
        weight, bias, norm = sample.weights
        x, residual = sample.arguments
        gemm = Gemm(
            weight_OI=weight.values_OI, scales_OG=weight.scales_OG, group=group or 4096,
            bias_O=bias, norm_I=norm, eps=problem.eps or 0.0, activation=problem.activation or "",
            add=problem.add,
        )  # fmt: skip
        y = torch.empty(1, problem.results, dtype=BF16) if residual is None else residual
        return launcher(gemm, ONE_OF_BYTES, 1)(x, y)

    return call


def _int4(tokens: int, group: int | None = 128, **more: object) -> Callable[[], object]:
    """A layer with a weight of 4-bit integers, by the kernels of any GPU."""

    def call() -> object:
        from headrace.back.kernels.linear_int4 import triton_linear_int4

        problem = linear_int4.LinearInt4Problem(
            device="cpu", dtype=BF16, inputs=1024, outputs=512, group=group, **more
        )
        sample = linear_int4.sample_of(problem, (tokens,))
        return triton_linear_int4.bind(problem, *sample.weights)(*sample.arguments)

    return call


def _int8(tokens: int, group: int | None, **more: object) -> Callable[[], object]:
    """A layer with a weight of 8-bit integers."""

    def call() -> object:
        from headrace.back.kernels.linear_int8 import triton_linear_int8

        problem = linear_int8.LinearInt8Problem(
            device="cpu", dtype=BF16, inputs=1024, outputs=512, group=group, **more
        )
        sample = linear_int8.sample_of(problem, (tokens,))
        return triton_linear_int8.bind(problem, *sample.weights)(*sample.arguments)

    return call


def _int4_stream(
    tokens: int, group: int | None = 128, depth: int = 0, **more: object
) -> Callable[[], object]:
    """The same by those of Hopper."""

    def call() -> object:
        problem = linear_int4.LinearInt4Problem(
            device="cpu", dtype=BF16, inputs=1024, outputs=512, group=group, **more
        )
        sample = linear_int4.sample_of(problem, (tokens,))
        weight, bias, norm = sample.weights
        x, residual = sample.arguments
        gemm = linear_int4_stream.Int4Gemm(
            weight=weight, bias_O=bias, norm_I=norm, eps=problem.eps or 0.0,
            activation=problem.activation, add=problem.add,
        )  # fmt: skip
        plan = linear_int4_stream.StreamPlan(stages=4, per_sm=2, tokens=tokens, depth=depth)
        y = torch.empty(tokens, problem.results, dtype=BF16) if residual is None else residual
        return linear_int4_stream.bind(gemm, plan)(x, y)

    return call


def _fixed(tokens: int, **more: object) -> Callable[[], object]:
    """The same in one order of sums."""
    gated = bool(more.get("activation"))
    run = fixed(Gemm(weight_OI=torch.zeros(1024 if gated else 512, 4096, dtype=BF16), **more))
    return lambda: run(torch.zeros(tokens, 4096, dtype=BF16), torch.zeros(tokens, 512, dtype=BF16))


def _sums(*, two_shot: bool, norm: bool, dtype: torch.dtype = BF16) -> Callable[[], object]:
    sums = PeerSums((16, 32, 48, 64), rank=1, device=torch.device("cpu"), most_bytes=1 << 20)
    x, residual = torch.zeros(8, 4096, dtype=dtype), torch.zeros(8, 4096, dtype=dtype)
    if not norm:
        return lambda: sums.all_reduce(x, two_shot=two_shot)
    return lambda: sums.add_norm(x, residual, _ONES, eps=1e-6, two_shot=two_shot)


SLOPES = (0.25, 0.0625, 0.015625, 0.00390625)
_ATTENTION = "attention.triton_attention:KERNEL"
_FIXED_ATTENTION = "attention.triton_fixed:KERNEL"
_QK = "qk_rope_write.triton_qk_rope_write:KERNEL"
_NORM = "rms_norm.triton_rms_norm:"
_LAYER_NORM = "layer_norm.triton_layer_norm:"
GEMV = GemmPlan(kernel="gemv", n=2, k=2048, warps=8)
SKINNY = GemmPlan(kernel="skinny", n=32, k=128, warps=4, stages=4, prefetch=2)
SPLIT = GemmPlan(kernel="skinny", n=64, k=128, warps=4, stages=4, split=4)
SWAPPED = GemmPlan(kernel="skinny", n=64, k=128, warps=4, stages=4, split=2, swap=True)
ONE_OF_BYTES = GemmPlan(kernel="gemv_bytes", n=4, k=2048, warps=4)
STREAM = GemmPlan(kernel="stream", n=64, k=128, warps=4, stages=4)
WIDE = [
    GemmPlan(kernel="wide", m=m, n=192, k=64, warps=4, stages=stages, group=16)
    for m, stages in ((128, 5), (256, 3))
]
_ONES = torch.ones(4096)
_ACT = "gated_act.triton_gated_act:KERNEL"
STEP = step_inputs.StepInputsProblem(device="cpu", block_tokens=16, max_rows=9)
SPECULATIVE = step_inputs.StepInputsProblem(
    device="cpu", block_tokens=16, max_rows=9, speculates=True
)
UNEQUAL = replace(
    SPECULATIVE,
    groups=(
        step_inputs.GroupBlocks(tokens=32),
        step_inputs.GroupBlocks(tokens=16, span=40),
        step_inputs.GroupBlocks(tokens=16),
    ),
)
STATE = state_rows.StateRowsProblem(device="cpu", block_tokens=16)
RETURN = state_return.StateReturnProblem(device="cpu", trail=StateTrail(first=8, depth=3))
_SPANS = "span_attention.triton_spans:KERNEL"


def _spans(head_dim: int, **more: object) -> span_attention.SpanAttentionProblem:
    shape = {"device": "cpu", "dtype": BF16, "heads": 16, "kv_heads": 16, "head_dim": head_dim}
    return span_attention.SpanAttentionProblem(**shape, scale=head_dim**-0.5, **more)


PATCH_POSITIONS = patch_places.PatchPositionsProblem(
    device="cpu", dtype=BF16, width=1152, merge=2, side=48
)
PATCH_TURNS = patch_places.PatchTurnsProblem(device="cpu", head_dim=72, merge=2, theta=10_000.0)
MOVED = position_shift.PositionShiftProblem(device="cpu")
NGRAM = ngram_draft.NgramDraftProblem(device="cpu", min_match=2, max_match=4)

LATENT_WRITE = latent_write.LatentWriteProblem(
    device="cpu", dtype=BF16, heads=16, nope=128, rank=512, rotary=64, block_tokens=16, eps=1e-6
)
LATENT = latent_attention.LatentAttentionProblem(
    device="cpu", dtype=BF16, heads=16, rank=512, rotary=64, block_tokens=16, scale=0.1
)
SPARSE_LATENT = sparse.SparseLatentProblem(
    device="cpu", dtype=BF16, heads=16, rank=512, rotary=64, top_k=2048, block_tokens=16,
    scale=0.07,
)  # fmt: skip
SPARSE = sparse_heads.SparseAttentionProblem(
    device="cpu", dtype=BF16, heads=64, kv_heads=4, head_dim=128, lists=4, top_k=2048,
    block_tokens=16, scale=0.09,
)  # fmt: skip
INDEX = index_select.IndexSelectProblem(
    device="cpu", dtype=BF16, heads=64, dim=128, top_k=512, block_tokens=16
)
INDEX_WRITE = index_write.IndexWriteProblem(
    device="cpu", dtype=BF16, heads=64, dim=128, rotary=64, block_tokens=16, eps=1e-6
)
KV_WRITE = kv_write.KVWriteProblem(
    device="cpu", dtype=BF16, kv_heads=8, head_dim=128, block_tokens=16
)
ROPE = rope.RopeProblem(device="cpu", dtype=BF16, head_dim=128, rotary_dim=128)
BEST_KEYS = group_select.GroupSelectProblem(
    device="cpu", dtype=BF16, heads=4, dim=128, group=128, top_k=2, block_tokens=128, best_key=True,
    local=1,
)  # fmt: skip
POOLED = group_write.GroupWriteProblem(
    device="cpu", dtype=BF16, width=512, group=4, block_tokens=16, series=2, gated=True, eps=1e-6,
    rotary=64, offset=448, layout="pairs",
)  # fmt: skip
COMPRESSED = compressed.CompressedProblem(
    device="cpu", dtype=BF16, heads=64, head_dim=512, window=128, group=4, top_k=512,
    block_tokens=16, scale=0.04,
)  # fmt: skip
ROUTE = route.RouteProblem(
    device="cpu", experts=256, top_k=8, score="sigmoid", renormalize=True, groups=8,
    kept_groups=4, group_score="top2", bias=True, shared=1,
)  # fmt: skip
GPT_OSS: dict[str, object] = {"activation": "swiglu_oai", "clamp": 7.0, "bias": True}
_FUSED_ROUTE = "fused_route.triton_fused_route:KERNEL"
FUSED_ROUTES = {
    "Qwen3": fused_route.FusedRouteProblem(
        route=route.RouteProblem(device="cpu", experts=128, top_k=8, renormalize=True),
        dtype=BF16,
        width=2048,
        eps=1e-6,
    ),
    "shared": fused_route.FusedRouteProblem(
        route=route.RouteProblem(
            device="cpu", experts=60, top_k=4, shared=4, shared_gate=True, softmax_chosen=True
        ),
        dtype=BF16,
        width=2056,
        eps=1e-6,
        bias=True,
    ),
    "sigmoid": fused_route.FusedRouteProblem(
        route=replace(ROUTE, groups=1, kept_groups=1), dtype=BF16, width=7168, eps=1e-6
    ),
}
EXPERTS = experts.ExpertsProblem(
    device="cpu", dtype=BF16, experts=128, slots=8, width=2048, inner=768
)
ABSORB = head_linear.HeadLinearProblem(device="cpu", dtype=BF16, heads=16, inputs=128, outputs=512)

CASES: list[tuple[str, Callable[[], object]]] = [
    ("attention 32/8x128", _call(attention.OP, _ATTENTION, _attention(32, 8, 128))),
    ("attention fp32", _call(attention.OP, _ATTENTION, _attention(4, 2, 64, FP32))),
    (
        "attention 256 window cap",
        _call(attention.OP, _ATTENTION, _attention(8, 4, 256, window=20, softcap=50.0)),
    ),
    ("attention chunks", _call(attention.OP, _ATTENTION, _attention(8, 4, 128, chunk=8192))),
    (
        "attention int8 quantized",
        _call(attention.OP, _ATTENTION, _attention(32, 8, 128, quantized="int8")),
    ),
    (
        "attention fp8 quantized sinks",
        _call(attention.OP, _ATTENTION, _attention(32, 8, 128, quantized="fp8", sinks=True)),
    ),
    *(
        (
            f"attention {form} quantized",
            _call(attention.OP, _ATTENTION, _attention(32, 8, 128, quantized=form)),
        )
        for form in ("fp8_e5m2", *NARROW)
    ),
    ("attention ALiBi", _call(attention.OP, _ATTENTION, _attention(4, 4, 128, slopes=SLOPES))),
    (
        "attention seeing each other",
        _call(attention.OP, _ATTENTION, _attention(8, 4, 256, window=1024, causal=False)),
    ),
    ("attention Hopper", _hopper),
    ("attention Hopper variants", _hopper_variants),
    ("attention Hopper decode", _hopper_decode),
    ("attention Hopper lse", _hopper_lse),
    ("attention few queries", _few_queries),
    ("attention Hopper few queries", _hopper_few_queries),
    ("attention lse", _lse(_ATTENTION, _attention(32, 8, 128))),
    (
        "attention lse partial sinks",
        _lse(_ATTENTION, _attention(14, 2, 64, causal=False, sinks=True)),
    ),
    ("attention fixed lse", _lse(_FIXED_ATTENTION, _attention(32, 8, 128, causal=False))),
    (
        "merge_attention",
        _call(
            merge_attention.OP,
            "merge_attention.triton_merge_attention:KERNEL",
            merge_attention.MergeAttentionProblem(device="cpu", dtype=BF16, heads=32, head_dim=128),
        ),
    ),
    ("attention shared", _shared),
    ("latent_attention", _latent_attention),
    ("latent_attention Hopper", _latent_hopper),
    ("expanded_attention Hopper", _expanded_attention),
    (
        "latent_write",
        _call(latent_write.OP, "latent_write.triton_latent_write:KERNEL", LATENT_WRITE),
    ),
    (
        "sparse_latent_attention",
        _call(sparse.OP, "sparse_latent_attention.triton_sparse_latent:KERNEL", SPARSE_LATENT),
    ),
    ("sparse_latent_attention by steps", _sparse_by_steps),
    ("latents int8", _quantized_latents("int8")),
    ("latents fp8 quantized", _quantized_latents("fp8")),
    (
        "sparse_attention",
        _call(sparse_heads.OP, "sparse_attention.triton_sparse_attention:KERNEL", SPARSE),
    ),
    ("index_write", _call(index_write.OP, "index_write.triton_index_write:KERNEL", INDEX_WRITE)),
    ("kv_write", _call(kv_write.OP, "kv_write.triton_kv_write:KERNEL", KV_WRITE)),
    ("rope", _call(rope.OP, "rope.triton_rope:KERNEL", ROPE)),
    ("index_select", _call(index_select.OP, "index_select.triton_index_select:KERNEL", INDEX)),
    ("index_select parts", _index_select_parts),
    (
        "group_select",
        _call(group_select.OP, "group_select.triton_group_select:KERNEL", BEST_KEYS),
    ),
    ("group_write", _call(group_write.OP, "group_write.triton_group_write:KERNEL", POOLED)),
    (
        "compressed_attention",
        _call(
            compressed.OP,
            "compressed_attention.triton_compressed_attention:KERNEL",
            COMPRESSED,
        ),
    ),
    ("route", _call(route.OP, "route.triton_route:KERNEL", ROUTE)),
    *(
        (f"fused_route {name}", _call(fused_route.OP, _FUSED_ROUTE, problem))
        for name, problem in FUSED_ROUTES.items()
    ),
    ("experts", _call(experts.OP, "experts.triton_experts:KERNEL", EXPERTS)),
    (
        "experts situ",
        _call(experts.OP, "experts.triton_experts:KERNEL", replace(EXPERTS, activation="situ")),
    ),
    ("experts Hopper", _experts_hopper),
    ("experts Hopper of a rank", partial(_experts_hopper, absent=True)),
    ("experts Hopper add", partial(_experts_hopper, adds=True)),
    ("experts fp8 add", _experts_fp8(128, adds=True)),
    ("experts fp8 of a rank", _experts_fp8(128, absent=True)),
    ("experts fp8", _experts_fp8(None, **GPT_OSS)),
    ("experts fp8 in blocks", _experts_fp8(128)),
    ("experts fp8 Hopper", _experts_fp8(None, hopper=True, **GPT_OSS)),
    ("experts fp8 Hopper in blocks", _experts_fp8(128, hopper=True)),
    ("experts fp8 Hopper of one scale", _experts_fp8(None, hopper=True, fixed=True)),
    ("experts fp8 of one scale", _experts_fp8(None, fixed=True)),
    ("experts int4", _experts_int4(Int4Form(128))),
    ("experts mxfp4", _experts_int4(Int4Form(32, floats=True), **GPT_OSS)),
    ("experts int4 Hopper", _experts_int4(Int4Form(32, minima=True), hopper=True)),
    ("experts int4 Hopper of 16", _experts_int4(Int4Form(16, minima=True), hopper=True)),
    ("experts int4 Hopper of all", _experts_int4(Int4Form(None), hopper=True)),
    ("experts nvfp4 Hopper", _experts_int4(Int4Form(16, floats=True), hopper=True)),
    ("experts int8", _experts_bytes(ByteForm(None))),
    ("experts int8 of 16", _experts_bytes(ByteForm(16))),
    ("experts mxfp8", _experts_bytes(ByteForm(32, floats=True), **GPT_OSS)),
    ("experts mxfp4 Hopper", _experts_int4(Int4Form(32, floats=True), hopper=True, **GPT_OSS)),
    ("head_linear", _call(head_linear.OP, "head_linear.triton_head_linear:KERNEL", ABSORB)),
    ("attention 80", _call(attention.OP, _ATTENTION, _attention(32, 32, 80))),
    ("qk_rope_write norm", _call(qk_rope_write.OP, _QK, _qk(32, 8, 128, 128, eps=1e-6))),
    (
        "qk_rope_write pairs partial",
        _call(qk_rope_write.OP, _QK, _qk(28, 4, 96, 32, layout="pairs")),
    ),
    *(
        (
            f"qk_rope_write {form} quantized",
            _call(qk_rope_write.OP, _QK, _qk(32, 8, 128, 128, eps=1e-6, quantized=form)),
        )
        for form in ("fp8_e5m2", *NARROW)
    ),
    (
        "qk_rope_write int8 quantized",
        _call(qk_rope_write.OP, _QK, _qk(32, 8, 128, 128, eps=1e-6, quantized="int8")),
    ),
    (
        "qk_rope_write fp8 quantized",
        _call(qk_rope_write.OP, _QK, _qk(28, 4, 96, 32, layout="pairs", quantized="fp8")),
    ),
    ("rms_norm", _call(rms_norm.OP, _NORM + "KERNEL", _norm(4096))),
    ("add_rms_norm", _call(rms_norm.ADD_OP, _NORM + "ADD_KERNEL", _norm(5120))),
    *(
        (
            f"gated_act {activation}",
            _call(
                gated_act.OP,
                _ACT,
                gated_act.GatedActProblem(
                    device="cpu", dtype=BF16, width=12288, activation=activation
                ),
            ),
        )
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    ),
    ("layer_norm", _call(layer_norm.OP, _LAYER_NORM + "KERNEL", _layer_norm(128, heads=8))),
    ("add_layer_norm", _call(layer_norm.ADD_OP, _LAYER_NORM + "ADD_KERNEL", _layer_norm(5120))),
    *(
        (
            f"activation {name}",
            _call(
                activation.OP,
                "activation.triton_activation:KERNEL",
                activation.ActivationProblem(device="cpu", dtype=BF16, activation=name),
            ),
        )
        for name in ("gelu_tanh", "relu2")
    ),
    *(
        (
            f"gated_norm {group}",
            _call(
                gated_norm.OP,
                "gated_norm.triton_gated_norm:KERNEL",
                gated_norm.GatedNormProblem(
                    device="cpu", dtype=BF16, width=8192, group=group, eps=1e-5
                ),
            ),
        )
        for group in (0, 1024)
    ),
    *(
        (f"recurrent {name}", _recurrent(name))
        for name in (
            "gated_scan",
            "causal_conv",
            "gated_delta-wide",
            "gated_delta-bounded",
            "ssd_scan-limits",
            "selective_scan",
            "wkv",
            "wkv6",
            "wkv7",
            "token_shift",
        )
    ),
    ("chunks gated_delta", _chunks()),
    ("chunks gated_delta channels", _chunks(per_channel=True)),
    ("chunks gated_delta 24", _chunks(key_dim=24, value_dim=20)),
    ("chunks gated_delta 256", _chunks(key_dim=256, value_dim=256)),
    ("chunks causal_conv", _conv_tiles),
    ("chunks ssd_scan", _ssd_chunks(64, 128)),
    ("chunks ssd_scan 256", _ssd_chunks(128, 256)),
    *(
        (f"state {name.lower()}", _call(op, f"state_rows.triton_state_rows:{name}_KERNEL", STATE))
        for name, op in (("BEGIN", state_rows.BEGIN_OP), ("KEEP", state_rows.KEEP_OP))
    ),
    ("state return", _call(state_return.OP, "state_return.triton_state_return:KERNEL", RETURN)),
    *(
        (
            f"position {name.lower()}",
            _call(op, f"position_shift.triton_position_shift:{name}_KERNEL", MOVED),
        )
        for name, op in (("ADD", position_shift.ADD_OP), ("SUBTRACT", position_shift.SUBTRACT_OP))
    ),
    (
        "patch positions",
        _call(patch_places.OP, "patch_places.triton_patch_places:POSITIONS", PATCH_POSITIONS),
    ),
    (
        "patch turns",
        _call(patch_places.TURNS_OP, "patch_places.triton_patch_places:TURNS", PATCH_TURNS),
    ),
    ("spans 72", _call(span_attention.OP, _SPANS, _spans(72))),
    ("spans 64 window", _call(span_attention.OP, _SPANS, _spans(64, window=64))),
    ("greedy", _call(greedy.OP, "greedy.triton_greedy:KERNEL", greedy.GreedyProblem(device="cpu"))),
    ("gumbel", _call(gumbel.OP, "gumbel.triton_gumbel:KERNEL", gumbel.GumbelProblem(device="cpu"))),
    ("attention fixed 32/8x128", _call(attention.OP, _FIXED_ATTENTION, _attention(32, 8, 128))),
    (
        "attention fixed 256 window cap",
        _call(attention.OP, _FIXED_ATTENTION, _attention(8, 4, 256, window=20, softcap=50.0)),
    ),
    (
        "attention fixed ALiBi",
        _call(attention.OP, _FIXED_ATTENTION, _attention(4, 4, 128, slopes=SLOPES)),
    ),
    (
        "attention fixed bias",
        _call(attention.OP, _FIXED_ATTENTION, _attention(4, 4, 64, bias_width=128)),
    ),
    ("attention fixed decodes", _fixed_decodes),
    ("fixed few act", _fixed(1, activation="silu")),
    ("fixed few add", _fixed(64, add=True)),
    ("fixed many act", _fixed(200, activation="silu")),
    ("fixed many bias", _fixed(20_000, bias_O=_ONES[:512].to(BF16))),
    ("sums one shot", _sums(two_shot=False, norm=False)),
    ("sums one shot norm", _sums(two_shot=False, norm=True)),
    ("sums two shots norm fp32", _sums(two_shot=True, norm=True, dtype=FP32)),
    (
        "penalties",
        _call(
            penalties.OP,
            "penalties.triton_penalties:KERNEL",
            penalties.PenaltiesProblem(device="cpu"),
        ),
    ),
    (
        "logit_masks",
        _call(
            logit_masks.OP,
            "logit_masks.triton_logit_masks:KERNEL",
            logit_masks.LogitMasksProblem(device="cpu"),
        ),
    ),
    (
        "token_scores",
        _call(
            token_scores.OP,
            "token_scores.triton_token_scores:KERNEL",
            token_scores.TokenScoresProblem(device="cpu"),
        ),
    ),
    ("gemv", _product(GEMV, 1)),
    ("gemv norm act", _product(GEMV, 1, norm_I=_ONES, eps=1e-6, activation="silu")),
    ("gemv add bias", _product(GEMV, 1, bias_O=_ONES[:512].to(BF16), add=True)),
    *(
        (f"linear fp8 quantized {tokens} of {group}", _fp8(group, tokens, **around))
        for group in (None, 128)
        for tokens, around in (
            (1, {"eps": 1e-6, "activation": "silu"}),
            (16, {"activation": "silu"}),
            (64, {"add": True}),
            (200, {"eps": 1e-6, "bias": True}),
        )
    ),
    ("linear fp8 quantized gates", _fp8(None, 200, gated="silu", add=True)),
    ("linear fp8 dequantized", _fp8(32, 300, eps=1e-6, activation="silu")),
    ("linear fp8 quantized wide", _fp8(None, 600, gated="silu", inputs=12288)),
    ("linear fp8 quantized parts", _fp8(128, 100, gated="silu", inputs=12288)),
    ("int4 one of 32", _int4(1, 32, minima=True, activation="silu", eps=1e-6)),
    ("int4 64", _int4(64, add=True)),
    ("int4 300", _int4(300, None, bias=True)),
    ("int8 one of 16", _int8(1, 16, activation="silu", eps=1e-6)),
    ("int8 16 of 32", _int8(16, 32, add=True)),
    ("int8 64", _int8(64, None, bias=True)),
    ("int8 one with minima", _int8(1, 32, minima=True, activation="silu", eps=1e-6)),
    ("int8 32 with minima", _int8(32, 32, minima=True)),
    ("int8 by int8", _int8(100, None, eps=1e-6, int8_rows=True)),
    ("int8 by int8 of one scale", _int8(100, None, int8_rows=True, fixed=True, zero=True)),
    ("int8 by int8 of 128", _int8(100, 128, int8_rows=True)),
    ("nf4 16", _int4(16, 64, floats=True, levels="nf4")),
    ("int4 by int8", _int4(300, 128, int8_rows=True)),
    ("int4 stream one", _int4_stream(1, eps=1e-6, activation="silu")),
    ("int4 stream one of 32", _int4_stream(1, 32, minima=True, add=True, bias=True)),
    ("int4 rows of 32", _int4_stream(1, 32, 1, minima=True, eps=1e-6, activation="silu")),
    ("int4 rows of 64", _int4_stream(1, 64, 1, add=True, bias=True)),
    ("int4 rows of 16", _int4_stream(1, 16, 2, minima=True, add=True)),
    ("int4 stream one of e2m1", _int4_stream(1, 32, floats=True, eps=1e-6, activation="silu")),
    ("int4 stream 8 of nvfp4", _int4_stream(8, 16, floats=True, bias=True)),
    ("int4 stream one of 16", _int4_stream(1, 16, minima=True, activation="silu")),
    ("int4 stream 64 of 16", _int4_stream(64, 16, minima=True, activation="silu")),
    ("int4 of nvfp4", _int4(64, 16, floats=True)),
    ("int4 stream 16 of e2m1", _int4_stream(16, 32, floats=True, add=True)),
    ("int4 stream rows", _int4_stream(1, depth=1, eps=1e-6, activation="silu")),
    ("int4 stream rows of all", _int4_stream(1, None, depth=2, minima=True, add=True, bias=True)),
    ("int4 stream 8", _int4_stream(8, None, activation="silu")),
    ("int4 stream 64 of 64", _int4_stream(64, 64, minima=True, add=True)),
    ("skinny act", _product(SKINNY, 16, activation="silu")),
    ("skinny split add", _product(SPLIT, 64, add=True)),
    ("skinny swapped act", _product(SWAPPED, 16, activation="silu")),
    ("bytes act", _one_of_bytes(None, eps=1e-6, activation="silu")),
    ("bytes in groups", _one_of_bytes(128, eps=1e-6, activation="silu", bias=True)),
    ("bytes in groups of 32 add", _one_of_bytes(32, add=True)),
    ("stream act", _product(STREAM, 8, activation="silu")),
    ("stream add", _product(STREAM, 64, add=True)),
    *((f"wide {plan.m} act", _product(plan, 1024, activation="silu")) for plan in WIDE),
    ("lora_linear of many rows", _many_adapted),
    (
        "lora_embedding",
        _call(
            lora_embedding.OP,
            "lora_embedding.triton_lora_embedding:KERNEL",
            lora_embedding.LoraEmbeddingProblem(
                device="cpu", dtype=BF16, rows=64, width=512, rank=16, slots=4
            ),
        ),
    ),
    *(
        (
            f"lora_linear of {rank} ranks",
            _call(
                lora_linear.OP,
                "lora_linear.triton_lora_linear:KERNEL",
                lora_linear.LoraLinearProblem(
                    device="cpu", dtype=BF16, inputs=512, parts=parts, rank=rank, slots=4
                ),
            ),
        )
        for rank, parts in ((16, (256, 64, 64)), (64, (384,)))
    ),
    ("step_inputs", _call(step_inputs.OP, "step_inputs.triton_step:KERNEL", STEP)),
    ("step_commit", _call(step_commit.OP, "step_commit.triton_commit:KERNEL", STEP)),
    (
        "step_inputs with lengths",
        _call(step_inputs.OP, "step_inputs.triton_step:KERNEL", SPECULATIVE),
    ),
    (
        "step_inputs of unequal groups",
        _call(step_inputs.OP, "step_inputs.triton_step:KERNEL", UNEQUAL),
    ),
    (
        "step_commit with lengths",
        _call(step_commit.OP, "step_commit.triton_commit:KERNEL", SPECULATIVE),
    ),
    ("step_verify", _call(step_verify.OP, "step_verify.triton_verify:KERNEL", SPECULATIVE)),
    ("ngram_draft", _call(ngram_draft.OP, "ngram_draft.triton_ngram:KERNEL", NGRAM)),
    ("sample", _call(sample.OP, "sample.triton_sample:KERNEL", sample.SampleProblem(device="cpu"))),
    (
        "nucleus",
        _call(nucleus.OP, "nucleus.triton_nucleus:KERNEL", nucleus.NucleusProblem(device="cpu")),
    ),
]
"""(title, call)."""

ONLY = {
    title: {"cuda:90"}
    for title in (
        *("attention Hopper", "attention Hopper decode", "attention Hopper lse"),
        *("attention Hopper variants", "sparse_latent_attention by steps"),
        "attention Hopper few queries",
        *("int4 stream one", "int4 stream one of 32", "int4 stream 8", "int4 stream 64 of 64"),
        *("int4 stream rows", "int4 stream rows of all"),
        *("int4 stream one of e2m1", "int4 stream 16 of e2m1", "int4 stream 8 of nvfp4"),
        *("int4 stream one of 16", "int4 stream 64 of 16"),
        *("bytes act", "bytes in groups", "bytes in groups of 32 add"),
        *("stream act", "stream add", "wide 128 act", "wide 256 act"),
        *("experts fp8 Hopper", "experts fp8 Hopper in blocks", "experts fp8 Hopper of one scale"),
        *("experts int4 Hopper", "experts int4 Hopper of all", "experts mxfp4 Hopper"),
        "experts int4 Hopper of 16",
        "experts nvfp4 Hopper",
        *("experts Hopper", "experts Hopper of a rank", "experts Hopper add"),
        *("expanded_attention Hopper", "latent_attention Hopper"),
        *("chunks gated_delta", "chunks gated_delta channels", "chunks gated_delta 24"),
        *("chunks gated_delta 256", "chunks ssd_scan", "chunks ssd_scan 256"),
    )
}
"""The targets of kernels that are for some alone."""
_NO_FP8 = {"cuda:80", "hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1201"}
NEVER = {
    "fp8 quantized": {"cuda:80"},
    "experts mxfp8": _NO_FP8,
    "experts fp8": _NO_FP8,
    "linear fp8": _NO_FP8,
}
"""Targets that lack what kernels with these words in their title need, as their `supports` says."""


def serves(title: str, target: str) -> bool:
    """Whether a case is compiled for a target."""
    if target not in ONLY.get(title, {target}):
        return False
    return not any(words in title and target in targets for words, targets in NEVER.items())
