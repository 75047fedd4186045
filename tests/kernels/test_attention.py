"""The paged attention reference equals attention written out token by token, and rows never touch each other."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.back.kernels.attention import op, reference
from headrace.back.kernels.attention.op import OP, AttentionProblem, SamplePlan, sample_plan
from headrace.back.kernels.attention.reference import bind_reference
from headrace.back.kernels.merge_attention.op import bind_reference as bind_merge
from headrace.back.kernels.op import Kernel, load_kernel
from tests.kernels.partial_attention import check_merged


def problem(**changes: object) -> AttentionProblem:
    values = {
        "device": "cpu",
        "dtype": torch.float32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "block_tokens": 4,
        "scale": 0.3,
    }
    return AttentionProblem(**{**values, **changes})


def inputs(
    case: AttentionProblem, rows: list[tuple[int, int]], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, SamplePlan]:
    """Queries, a cache that is NaN wherever nothing may be read, and the plan."""
    plan, num_blocks = sample_plan(
        rows,
        block_tokens=case.block_tokens,
        window=case.window,
        chunk=case.chunk,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(seed)
    kv = torch.full(
        (num_blocks, 2, case.kv_heads, case.block_tokens, case.head_dim),
        float("nan"),
        dtype=case.dtype,
    )
    for row, (_, kv_len) in enumerate(rows):
        for position in range(kv_len):
            block = int(plan.block_table_RB[row, position // case.block_tokens])
            if block:
                value = torch.randn(2, case.kv_heads, case.head_dim, generator=generator)
                kv[block, :, :, position % case.block_tokens] = value.to(case.dtype)
    total = sum(num_query for num_query, _ in rows)
    q = torch.randn(total, case.heads, case.head_dim, generator=generator).to(case.dtype)
    return q, kv, plan


def naive(
    case: AttentionProblem, q: torch.Tensor, kv: torch.Tensor, plan: SamplePlan
) -> torch.Tensor:
    """One query, one head, one key at a time."""
    out = torch.zeros_like(q)
    for row, kv_len in enumerate(plan.host_kv_len.tolist()):
        begin, end = plan.host_query_start[row : row + 2].tolist()
        for token in range(begin, end):
            position = kv_len - (end - token)
            lowest = max(0, position - case.window + 1) if case.window else 0
            if case.chunk:
                lowest = position - position % case.chunk
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                keys, values, scores = [], [], []
                for seen in range(lowest, position + 1 if case.causal else kv_len):
                    block = int(plan.block_table_RB[row, seen // case.block_tokens])
                    key, value = kv[block, :, kv_head, seen % case.block_tokens]
                    score = case.scale * float(q[token, head] @ key)
                    if case.softcap:
                        score = case.softcap * math.tanh(score / case.softcap)
                    if case.slopes:
                        score += case.slopes[head] * (seen - position)
                    keys.append(key)
                    values.append(value)
                    scores.append(score)
                weights = torch.tensor(scores).softmax(0)
                out[token, head] = weights @ torch.stack(values)
    return out


ROWS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=4,
).map(lambda rows: sorted(rows, key=lambda row: row[0] != 1))


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    reach=st.sampled_from(
        [{}, *({"window": size} for size in (1, 4, 7)), {"chunk": 1}, {"chunk": 5}]
    ),
    softcap=st.sampled_from([None, 2.0]),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    alibi=st.booleans(),
    causal=st.booleans(),
)
def test_equals_attention_written_out(
    rows: list[tuple[int, int]],
    reach: dict[str, int],
    softcap: float | None,
    heads: tuple[int, int],
    alibi: bool,
    causal: bool,
) -> None:
    slopes = tuple(0.5 / (i + 1) for i in range(heads[0])) if alibi else ()
    causal = causal or alibi or "chunk" in reach
    case = problem(
        **reach, softcap=softcap, heads=heads[0], kv_heads=heads[1], slopes=slopes, causal=causal
    )
    q, kv, plan = inputs(case, rows)
    got = OP.reference.bind(case)(q, kv, plan)
    torch.testing.assert_close(got, naive(case, q, kv, plan), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 30])
def test_tiles_and_groups_do_not_show(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(1, 9), (1, 64), (1, 33), (40, 70), (17, 17)]
    case = problem(window=window)
    q, kv, plan = inputs(case, rows)
    whole = OP.reference.bind(case)(q, kv, plan)
    monkeypatch.setattr(reference, "QUERY_TILE", 7)
    monkeypatch.setattr(reference, "GATHER_BYTES", 1)
    torch.testing.assert_close(OP.reference.bind(case)(q, kv, plan), whole, atol=1e-6, rtol=1e-5)


def test_a_row_with_nan_keys_and_values_touches_no_other() -> None:
    rows = [(1, 9), (1, 12), (5, 11), (3, 8)]
    case = problem()
    q, kv, plan = inputs(case, rows)
    clean = OP.reference.bind(case)(q, kv, plan)
    for row in (1, 3):
        kv[plan.block_table_RB[row, 0].item()] = float("nan")
    got = OP.reference.bind(case)(q, kv, plan)
    kept = [0, *range(2, 7)]
    assert torch.equal(got[kept], clean[kept])
    assert got[1].isnan().all()
    assert got[7:].isnan().all()


def test_a_decode_row_does_not_depend_on_its_company() -> None:
    case = problem()
    rows = [(1, 9), (1, 31), (1, 2)]
    q, kv, plan = inputs(case, rows)
    together = OP.reference.bind(case)(q, kv, plan)
    lone, _ = sample_plan([(1, 31)], block_tokens=4, window=None, device="cpu")
    lone.block_table_RB.copy_(plan.block_table_RB[1:2])
    alone = OP.reference.bind(case)(q[1:2], kv, lone)
    torch.testing.assert_close(alone[0], together[1], atol=1e-6, rtol=1e-6)


def test_bfloat16_stays_within_the_tolerance_of_the_self_check() -> None:
    case = problem(dtype=torch.bfloat16)
    q, kv, plan = inputs(case, [(1, 40), (9, 30)])
    got = OP.reference.bind(case)(q, kv, plan).float()
    wide = problem()
    expected = OP.reference.bind(wide)(q.float(), kv.float(), plan)
    assert (got - expected).abs().max() <= OP.tolerance(case) * expected.abs().max()


def naive_lse(
    case: AttentionProblem, q: torch.Tensor, kv: torch.Tensor, plan: SamplePlan
) -> torch.Tensor:
    """The log-sum-exp of every query and head, written out."""
    lse = torch.full(q.shape[:2], float("nan"))
    for row, kv_len in enumerate(plan.host_kv_len.tolist()):
        begin, end = plan.host_query_start[row : row + 2].tolist()
        for token in range(begin, end):
            position = kv_len - (end - token)
            lowest = max(0, position - case.window + 1) if case.window else 0
            if case.chunk:
                lowest = position - position % case.chunk
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                total = 0.0
                for seen in range(lowest, position + 1 if case.causal else kv_len):
                    block = int(plan.block_table_RB[row, seen // case.block_tokens])
                    key = kv[block, 0, kv_head, seen % case.block_tokens]
                    total += math.exp(case.scale * float(q[token, head] @ key))
                lse[token, head] = math.log(total)
    return lse


@pytest.mark.parametrize("window", [None, 4])
def test_log_sum_exps_are_those_of_the_scores(window: int | None) -> None:
    case = problem(window=window)
    q, kv, plan = inputs(case, [(1, 9), (1, 1), (6, 17), (3, 3)])
    lse = torch.full(q.shape[:2], float("nan"))
    out = OP.reference.bind(case)(q, kv, plan, lse)
    torch.testing.assert_close(lse, naive_lse(case, q, kv, plan), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, naive(case, q, kv, plan), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_halves_merge_to_the_whole(softcap: float | None, sinks: bool) -> None:
    case = problem(softcap=softcap, sinks=sinks)
    q, kv, plan = inputs(case, [(1, 30), (1, 3), (6, 17), (3, 3), (2, 26)])
    sinks_H = torch.linspace(-1.0, 3.0, case.heads) if sinks else None
    check_merged(
        bind_reference, bind_merge, case, q, kv, plan, bound=1e-6, sinks_H=sinks_H, same_bits=False
    )


def test_halves_of_scores_beyond_the_range_of_exp_merge_to_the_whole() -> None:
    case = problem()
    q, kv, plan = inputs(case, [(1, 30), (1, 3), (6, 17)])
    check_merged(bind_reference, bind_merge, case, q * 1000, kv, plan, bound=1e-6, same_bits=False)


def test_a_chunk_needs_causal_queries() -> None:
    with pytest.raises(AssertionError):
        problem(chunk=4, causal=False)


def table_of_files() -> dict[str, list[str]]:
    """The table in the op's docstring: file -> hardware, dtypes, caches."""
    assert op.__doc__ is not None
    lines = [line.strip() for line in op.__doc__.splitlines()]
    rows = [re.split(r" {2,}", line) for line in lines if re.match(r"\w+\.py  ", line)]
    return {row[0]: row[1:4] for row in rows}


def test_the_table_names_every_file_with_a_kernel() -> None:
    folder = Path(op.__file__).parent
    attends = re.compile(r"def \w+_kernel\(\s*(?:cache,\s*)?(?:scales,\s*)?q,")
    with_kernels = {path.name for path in folder.glob("*.py") if attends.search(path.read_text())}
    entries = {target.split(":")[0].rpartition(".")[2] + ".py" for target in OP.kernels}
    assert set(table_of_files()) == {"reference.py", *entries, *with_kernels}


@pytest.mark.parametrize("target", OP.kernels)
def test_the_table_says_what_the_kernels_support(target: str) -> None:
    kernel = load_kernel(target)
    if not isinstance(kernel, Kernel):
        pytest.skip(kernel)
    pytest.importorskip("triton")
    from headrace.back.kernels.triton.wrap import planned_for

    hardware, dtypes, caches = table_of_files()[target.split(":")[0].rpartition(".")[2] + ".py"]
    known = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for (name, dtype), cache in itertools.product(known.items(), ("q", "int8", "fp8")):
        case = problem(
            device={"CPU": "cpu", "GPU": "cuda"}[hardware],
            dtype=dtype,
            head_dim=64,
            quantized=None if cache == "q" else cache,
        )
        with planned_for((9, 0)):
            reason = kernel.supports(case)
        listed = name in dtypes.split() and cache in caches.split()
        assert (reason is None) == listed, (name, cache, reason)
