"""The paged attention reference equals attention written out token by token, and rows never touch each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.back.kernels.attention import reference
from headrace.back.kernels.attention.op import OP, AttentionProblem, SamplePlan, sample_plan


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
        rows, block_tokens=case.block_tokens, window=case.window, device="cpu"
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
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                keys, values, scores = [], [], []
                for seen in range(lowest, position + 1):
                    block = int(plan.block_table_RB[row, seen // case.block_tokens])
                    key, value = kv[block, :, kv_head, seen % case.block_tokens]
                    score = case.scale * float(q[token, head] @ key)
                    if case.softcap:
                        score = case.softcap * math.tanh(score / case.softcap)
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
    window=st.sampled_from([None, 1, 4, 7]),
    softcap=st.sampled_from([None, 2.0]),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
)
def test_equals_attention_written_out(
    rows: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
) -> None:
    case = problem(window=window, softcap=softcap, heads=heads[0], kv_heads=heads[1])
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
