"""Prefixes that rows share are found by their blocks and read once: in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention import cascade, triton_attention
from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.kv_write.quantized import dequantize
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.triton.test_kernels import (
    DTYPES,
    FP32,
    NAN,
    attention_case,
    close,
    exact,
)
from tests.kernels.triton.test_quantized import quantized_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]

# heads, KV heads, head_dim, block_tokens, window, soft cap
SHAPE = (4, 2, 64, 4, None, None)
ROWS = [(1, length) for length in (150, 170, 33, 12, 121, 140, 90, 97, 25, 71)] + [
    (3, 100),
    (9, 60),
]
GROUPS = {0: ([1, 4, 7, 10], 96), 2: ([5, 6, 8, 9, 11], 24)}
"""Leader: (rows that begin with its blocks, tokens of them). Rows 10 and 11 have several queries, and row 8 ends a
token after its prefix; row 3 is alone and too short to have one."""


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of 24 tokens and three rows count, and are cut into many items."""
    for name, value in (
        ("LEAST_ROWS", 2),
        ("MIN_ROWS", 3),
        ("MIN_TOKENS", 24),
        ("MIN_SPLIT_TOKENS", 16),
    ):
        monkeypatch.setattr(cascade, name, value)
    monkeypatch.setattr(cascade, "PROGRAMS_PER_SM", 6)


def shared_case(shape, dtype, rows=ROWS, groups=GROUPS, **more):
    """As attention_case, but rows of a group begin with the blocks of their leader."""
    problem, q, kv, plan, padded = attention_case(shape, dtype, rows, **more)
    for leader, (members, tokens) in groups.items():
        for row in members:
            blocks = tokens // shape[3]
            for one in (plan, padded):
                one.block_table_RB[row, :blocks] = one.block_table_RB[leader, :blocks]
    return problem, q, kv, plan, padded


def lists_of(problem, plan):
    """The lists of the cascade, on the host."""
    made = cascade._lists(problem, plan, triton_attention.prefill_tiles(problem))
    joins = made.joins.view(-1, cascade.JOIN_FIELDS).tolist()
    count, *_ = made.items.tolist()
    items = made.items.view(-1, cascade.ITEM_FIELDS)[1 : count + 1].tolist()
    return joins, made.packed.tolist(), items


def test_rows_join_where_their_blocks_are_the_same(eager):
    problem, *_, padded = shared_case(SHAPE, FP32, pad_rows=2)
    joins, packed, items = lists_of(problem, padded)
    assert [join[0] for join in joins] == [96, 96, 24, 0, 96, 24, 24, 96, 24, 24, 0, 0, 0, 0]
    assert packed[:9] == [0, 1, 4, 7, 2, 5, 6, 8, 9]
    for leader, members, tokens in ((0, [0, 1, 4, 7], 96), (2, [2, 5, 6, 8, 9], 24)):
        mine = [item for item in items if item[0] == leader]
        assert len(mine) == (3 if leader == 0 else 1)
        seen = sorted(
            (packed[item[1] + lane], position)
            for item in mine
            for lane in range(item[2])
            for position in range(item[3], item[4])
        )
        assert seen == sorted((row, position) for row in members for position in range(tokens))
        for row in members:
            _, first, count, lane = joins[row]
            assert all(packed[items[i][1] + lane] == row for i in range(first, first + count))
            assert sum(items[i][4] - items[i][3] for i in range(first, first + count)) == tokens


@pytest.mark.parametrize("change", ["too few rows", "too short", "others' blocks"])
def test_what_is_not_worth_it_is_not_joined(eager, change, monkeypatch):
    if change == "too few rows":
        monkeypatch.setattr(cascade, "MIN_ROWS", 6)
    elif change == "too short":
        monkeypatch.setattr(cascade, "MIN_TOKENS", 100)
    problem, _, _, plan, _ = shared_case(SHAPE, FP32)
    if change == "others' blocks":
        plan.block_table_RB[:, 1] = torch.arange(len(ROWS), dtype=torch.int32) + 1
    joins, _, items = lists_of(problem, plan)
    assert [join[0] for join in joins] == [0] * len(ROWS)
    assert [join[2] for join in joins] == [0] * len(ROWS)
    assert items == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, quantized, per_sm",
    [(SHAPE, None, 12), (SHAPE, "int8", 1), ((7, 1, 80, 8, None, 3.0), None, 1)],
)
def test_shared_prefixes_do_not_show(eager, dtype, quantized, shape, per_sm, monkeypatch):
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_TOKENS", 16)
    monkeypatch.setattr(triton_attention, "PROGRAMS_PER_SM", per_sm)
    problem, q, kv, plan, padded = shared_case(shape, dtype, pad_rows=2, pad_tokens=3)
    cache = kv
    if quantized:
        problem, cache = replace(problem, quantized=quantized), quantized_cache(kv, quantized)
        kv = dequantize(cache, FP32, quantized)
    layers = [triton_attention.bind(problem) for _ in range(2)]
    expected = exact(replace(problem, quantized=None), q, kv, plan)
    for layer in layers:
        out = layer(q, cache, padded)
        assert close(out[: len(expected)], expected, dtype)


def test_log_sum_exps_count_the_shared_prefix(eager):
    problem, q, kv, plan, _ = shared_case(SHAPE, FP32)
    lse, expected = torch.full((2, *q.shape[:2]), float("nan"), device=q.device)
    triton_attention.bind(problem)(q, kv, plan, lse)
    attention.OP.reference.bind(problem)(q, kv, plan, expected)
    torch.testing.assert_close(lse, expected, atol=1e-5, rtol=1e-5)


def test_sinks_count_once_beside_a_shared_prefix(eager):
    problem, q, kv, plan, _ = shared_case(SHAPE, FP32)
    problem = replace(problem, sinks=True)
    sinks_H = torch.tensor([-1.0, 0.5, 2.0, 9.0], device=q.device)
    out = triton_attention.bind(problem, sinks_H)(q, kv, plan)
    expected = attention.OP.reference.bind(problem, sinks_H)(q, kv, plan)
    assert close(out, expected, FP32)


def test_nan_behind_a_shared_prefix_stays_in_its_row(eager):
    problem, q, kv, plan, _ = shared_case(SHAPE, FP32)
    attend = triton_attention.bind(problem)
    clean = attend(q, kv, plan)
    kv[plan.block_table_RB[4, 29].item()] = NAN
    out = attend(q, kv, plan)
    assert out[4].isnan().all()
    others = [i for i in range(len(q)) if i != 4]
    assert torch.equal(out[others], clean[others])
