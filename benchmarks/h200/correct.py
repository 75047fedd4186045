"""Every Triton kernel against its reference on the device, on random shapes; and attention replayed from a graph."""

# ruff: noqa: E501 - a row of a table is a line
from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import replace

import torch

from benchmarks.h200.attention import poison, random_rows
from headrace.back.kernels.attention import triton_attention
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem, sample_plan
from headrace.back.kernels.fused_linear.op import OP as FUSED
from headrace.back.kernels.fused_linear.op import FusedLinearProblem
from headrace.back.kernels.gated_act.op import OP as ACT
from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.greedy import op as greedy
from headrace.back.kernels.greedy import triton_greedy
from headrace.back.kernels.gumbel import op as gumbel
from headrace.back.kernels.gumbel import triton_gumbel
from headrace.back.kernels.linear.op import OP as LINEAR
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.op import Op
from headrace.back.kernels.qk_rope_write.op import OP as QK
from headrace.back.kernels.qk_rope_write.op import QKRopeWriteProblem
from headrace.back.kernels.rms_norm.op import ADD_OP, RMSNormProblem
from headrace.back.kernels.rms_norm.op import OP as NORM

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {BF16: 1e-2, FP16: 2e-3, FP32: 1e-5}


def self_checks(part: int, parts: int) -> list[str]:
    """What the start-up check says of every op, for a share of many problems."""
    said = []
    for dtype in (BF16, FP32):
        base = {"device": "cuda", "dtype": dtype}
        problems: list[tuple[Op, object]] = [
            *((NORM, RMSNormProblem(**base, width=w, eps=1e-6)) for w in (128, 1024, 4096, 5120)),
            *((ADD_OP, RMSNormProblem(**base, width=w, eps=1e-6)) for w in (1024, 4096, 5376)),
            *((ACT, GatedActProblem(**base, width=3072, activation=a)) for a in ("silu", "gelu", "gelu_tanh", "relu")),
            *(
                (QK, QKRopeWriteProblem(**base, heads=h, kv_heads=k, head_dim=d, block_tokens=16, rotary_dim=r, layout=y, eps=e))
                for h, k, d, r, y, e in (
                    (32, 8, 128, 128, "half", 1e-6), (16, 8, 128, 128, "half", 1e-6), (28, 4, 128, 128, "half", None),
                    (32, 32, 80, 32, "half", None), (8, 4, 256, 256, "half", 1e-6), (32, 2, 128, 64, "pairs", None), (14, 2, 64, 0, "half", None),
                )
            ),
            *((LINEAR, LinearProblem(**base, inputs=i, outputs=o, bias=b)) for i, o, b in ((4096, 6144, False), (1024, 4096, True), (12288, 4096, False))),
            *(
                (FUSED, FusedLinearProblem(**base, inputs=i, outputs=o, bias=b, eps=e, activation=a, add=add))
                for i, o, b, e, a, add in (
                    (4096, 6144, False, 1e-6, None, False), (4096, 6144, True, 1e-6, None, False), (4096, 4096, False, None, None, True),
                    (4096, 24576, False, 1e-6, "silu", False), (12288, 4096, False, None, None, True), (1024, 6144, True, 1e-6, "gelu_tanh", False),
                )
            ),
        ]  # fmt: skip
        for op, problem in problems[part::parts]:
            choice = op.choose(problem)
            if choice.kernel.name != "triton":
                said.append(f"{op.name} {problem}: {choice.rejected}")
    return said


SHAPES = [
    (32, 8, 128, 16, None, None),
    (16, 8, 128, 16, None, None),
    (4, 2, 40, 8, 3, None),
    (14, 2, 64, 16, None, 5.0),
    (7, 7, 72, 4, 20, 2.0),
    (40, 1, 80, 16, 1, None),
    (8, 2, 96, 64, 50, None),
    (8, 4, 256, 16, 300, 50.0),
    (71, 1, 64, 16, None, None),
]


def attention_errors(dtype: torch.dtype, shape: tuple) -> list[str]:
    """Random steps of one shape against the float32 reference; unused places are NaN."""
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, head_dim, block_tokens, window, softcap = shape
    said = []
    case = AttentionProblem(
        device="cuda", dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        block_tokens=block_tokens, scale=head_dim**-0.5, window=window, softcap=softcap,
    )  # fmt: skip
    steps = [random_rows(generator, count, longest) for count, longest in ((5, 300), (40, 900))]
    steps += [[(1, 1), (1, 5000), (1, 17)], [(1, 700)] * 20, [(300, 2000), (77, 77)]]
    for rows in steps:
        plan, blocks = sample_plan(rows, block_tokens=block_tokens, window=window, device="cuda")
        tokens = sum(queries for queries, _ in rows)
        new = {"device": "cuda", "dtype": dtype}
        q = torch.randn(tokens, heads + 3, head_dim, **new)[:, :heads]
        kv = torch.randn(blocks, 2, kv_heads, block_tokens, head_dim, **new)
        poison(kv, plan)
        out = triton_attention.bind(case)(q, kv, plan).float()
        wide = replace(case, dtype=FP32)
        expected = ATTENTION.reference.bind(wide)(q.float(), kv.float(), plan)
        error = ((out - expected).abs().max() / expected.abs().max()).item()
        if not error <= BOUND[dtype]:
            said.append(f"attention {dtype} {shape} {rows[:6]}: {error:.2e}")
    return said


def replayed() -> list[str]:
    """A graph captured once serves other lengths and fewer rows."""
    said = []
    case = AttentionProblem(
        device="cuda", dtype=BF16, heads=16, kv_heads=8, head_dim=128, block_tokens=16, scale=0.09
    )
    generator = torch.Generator().manual_seed(2)
    for decode_only in (True, False):
        slots, capacity, tokens = 24, 64, 24 if decode_only else 512
        kv = torch.randn(slots * capacity + 1, 2, 8, 16, 128, device="cuda", dtype=BF16)
        q = torch.randn(tokens, 16, 128, device="cuda", dtype=BF16)
        full, _ = sample_plan(
            [(1, capacity * 16)] * slots, block_tokens=16, window=None, device="cuda"
        )
        plan = replace(
            full,
            max_query_len=1 if decode_only else tokens,
            host_kv_len=None,
            host_query_start=None,
        )
        attend = triton_attention.bind(case)
        attend(q, kv, plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(q, kv, plan)
        for count in (24, 1, 7, 13):
            rows = []
            for _ in range(count):
                length = int(torch.randint(1, capacity * 16, (), generator=generator))
                rows.append(
                    (
                        1
                        if decode_only
                        else min(length, int(torch.randint(1, 20, (), generator=generator))),
                        length,
                    )
                )
            queries = torch.tensor([r[0] for r in rows] + [0] * (slots - count)).cumsum(0)
            plan.query_start_R1.copy_(torch.cat((torch.zeros(1, dtype=torch.long), queries)).int())
            plan.kv_len_R.copy_(torch.tensor([r[1] for r in rows] + [0] * (slots - count)).int())
            out.fill_(float("nan"))
            graph.replay()
            got = out.clone()
            total = int(queries[-1])
            starts = plan.query_start_R1.cpu().numpy()[: count + 1]
            exact = replace(
                plan, query_start_R1=plan.query_start_R1[: count + 1], kv_len_R=plan.kv_len_R[:count],
                block_table_RB=plan.block_table_RB[:count], host_query_start=starts,
                host_kv_len=plan.kv_len_R.cpu().numpy()[:count], num_decodes=0, max_kv_len=capacity * 16,
            )  # fmt: skip
            wide = replace(case, dtype=FP32)
            expected = ATTENTION.reference.bind(wide)(q[:total].float(), kv.float(), exact)
            error = ((got[:total].float() - expected).abs().max() / expected.abs().max()).item()
            if not error <= 1e-2:
                said.append(f"replay decode_only={decode_only} rows={count}: {error:.2e}")
    return said


def sampling() -> list[str]:
    """Greedy and Gumbel choices on wide rows are the reference's."""
    said = []
    generator = torch.Generator(device="cuda").manual_seed(3)
    logits = 4 * torch.randn(64, 151936, device="cuda", generator=generator)
    logits[3, 1000:] = float("nan")
    logits[4] = float("-inf")
    logits[5] = logits[5].bfloat16().float()  # many ties
    ours = triton_greedy.bind(greedy.GreedyProblem(device="cuda"))(logits)
    theirs = greedy.OP.reference.bind(greedy.GreedyProblem(device="cpu"))(logits.cpu())
    if not torch.equal(ours[0].cpu(), theirs[0]) or not torch.equal(
        ours[1].cpu().nan_to_num(), theirs[1].nan_to_num()
    ):
        said.append(f"greedy {(ours[0].cpu() != theirs[0]).nonzero().flatten().tolist()}")
    temperature = torch.rand(64, device="cuda", dtype=torch.float64) + 0.2
    keys = torch.randint(-(1 << 62), 1 << 62, (64,), device="cuda")
    logits[3] = logits[6]
    one = triton_gumbel.bind(gumbel.GumbelProblem(device="cuda"))(logits, temperature, keys)
    two = gumbel.bind_reference(gumbel.GumbelProblem(device="cuda"))(logits, temperature, keys)
    three = gumbel.bind_reference(gumbel.GumbelProblem(device="cpu"))(
        logits.cpu(), temperature.cpu(), keys.cpu()
    )
    if (
        not torch.equal(one[0], two[0])
        or not torch.equal(one[1], two[1])
        or not torch.equal(one[0].cpu(), three[0])
    ):
        said.append(f"gumbel {(one[0] != two[0]).nonzero().flatten().tolist()}")
    return said


def check(processes: int = 15) -> list[str]:
    """Everything, by many processes, since most of the time goes into compiling; what is wrong, one line each."""
    tasks = [("replayed", ()), ("sampling", ())]
    tasks += [
        ("attention_errors", (dtype, shape)) for shape in SHAPES for dtype in (BF16, FP16, FP32)
    ]
    tasks += [("self_checks", (part, 10)) for part in range(10)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [line for lines in pool.imap_unordered(_run, tasks, chunksize=1) for line in lines]


def _run(task: tuple[str, tuple]) -> list[str]:
    name, arguments = task
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return globals()[name](*arguments)
    except Exception:
        return [f"{name} {arguments}: {traceback.format_exc()[-700:]}"]
