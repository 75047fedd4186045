"""How runs of tiles are dealt, in the interpreter and on a GPU; and the kernel of Hopper that streams the cache by
them, which needs the TMA and so a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention import cascade, hopper_decode, triton_attention
from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention.hopper_decode import Streams
from headrace.back.kernels.attention.triton_lists import row_bucket
from headrace.back.kernels.attention.triton_runs import RUN_FIELDS, runs_kernel
from headrace.back.kernels.kv_write.quantized import values_and_scales
from headrace.back.kernels.qk_rope_write import op as qk_rope_write
from headrace.back.kernels.qk_rope_write import triton_qk_rope_write
from headrace.back.kernels.triton.wrap import interpreted, power_of_two
from tests.kernels.partial_attention import exact as exact_lse
from tests.kernels.triton.test_cascade import shared_case
from tests.kernels.triton.test_kernels import (
    BF16,
    DEVICE,
    FP16,
    NAN,
    attention_case,
    close,
    exact,
)
from tests.kernels.triton.test_prefill import hopper_only
from tests.kernels.triton.test_quantized import CODES, in_codes, quantized_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
POSITIONS = 16
DEALS = [(1, 1), (5, 2), (33, 1), *([] if interpreted() else [(132, 4)])]
"""Runs at most, and tiles of a run at least."""


def runs_of(
    lengths: list[int], most: int, least: int, near: int, firsts: list[int], prompts: int = 0,
    most_queries: int = 1,
):  # fmt: skip
    """The list of runs, on the host; of the rows as many as `prompts`, the last, have two queries."""
    rows = len(lengths)
    queries = [int(length > 0) for length in lengths]
    queries[rows - prompts :] = [2] * prompts
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    joins = torch.zeros(rows, 4, dtype=torch.int32)
    joins[:, 0] = torch.tensor(firsts)
    runs = torch.full((most * RUN_FIELDS,), -1, dtype=torch.int32, device=DEVICE)
    runs_kernel[(most,)](
        starts.to(DEVICE), torch.tensor(lengths).int().to(DEVICE), joins.to(DEVICE), runs, rows, most,
        QUERIES=most_queries, POSITIONS=POSITIONS, LEAST=least, NEAR=near,
        ROWS=row_bucket(rows), RUNS=power_of_two(most), SHARED=any(firsts), DEPENDENT=False,
    )  # fmt: skip
    return runs.view(most, RUN_FIELDS).tolist()


@pytest.mark.parametrize("near", [0, 1, 8])
@pytest.mark.parametrize("most, least", DEALS)
def test_every_tile_is_in_one_run(most, least, near):
    """And who shares a row knows with whom."""
    generator = torch.Generator().manual_seed(most + near)
    for count, least_length, longest in ((1, 1, 700), (4, 1, 90), (40, 1, 300), (60, 230, 240)):
        lengths = torch.randint(least_length, longest, (count,), generator=generator).tolist()
        lengths += [0, 0]
        firsts = [length // 3 // POSITIONS * POSITIONS if count == 4 else 0 for length in lengths]
        tiles = [-(-(n - first) // POSITIONS) for n, first in zip(lengths, firsts, strict=True)]
        units = [(row, tile) for row, many in enumerate(tiles) for tile in range(many)]
        runs = runs_of(lengths, most, least, near, firsts)
        taken, parts = [], {}
        for i, (row, tile, many, *more) in enumerate(runs):
            if many == 0:
                continue
            sharers, told = more[:4], more[4:7]
            assert told == [lengths[row], firsts[row], row]
            mine = units[len(taken) : len(taken) + many]
            assert mine[0] == (row, tile)
            taken += mine
            for one, told in ((row, sharers[:2]), (mine[-1][0], sharers[2:4])):
                parts.setdefault(one, {})[i] = told
        assert taken == units
        average = len(units) / min(most, max(1, len(units) // least))
        assert max(run[2] for run in runs) <= 2 * average + 2
        for row, told in parts.items():
            assert {one[1] for one in told.values()} == {len(told)}, (row, told)
            if len(told) > 1:
                assert {one[0] for one in told.values()} == {min(told)}, (row, told)
            assert sorted(told) == list(range(min(told), min(told) + len(told)))


def test_rows_with_more_queries_are_not_dealt():
    """They are other kernels'; the runs are as if they were not there (KRN-10)."""
    decodes, none = [70, 1, 33, 200], [0] * 6
    alone = runs_of(decodes, 8, 1, 2, none[:4])
    beside = runs_of([*decodes, 400, 90], 8, 1, 2, none, prompts=2)
    assert [run[:7] for run in beside if run[2]] == [run[:7] for run in alone if run[2]]


def test_rows_with_drafts_are_dealt_as_those_without():
    rows, none = [70, 1, 33, 200, 90], [0] * 5
    alone = runs_of(rows, 8, 1, 2, none)
    drafted = runs_of(rows, 8, 1, 2, none, prompts=3, most_queries=2)
    assert [run[:9] for run in drafted if run[2]] == [run[:9] for run in alone if run[2]]


# heads, KV heads, head_dim, block_tokens, window, soft cap
SHAPES = [
    (8, 2, 128, 16, None, None),
    (32, 8, 128, 16, None, None),
    (16, 8, 128, 16, None, None),
    (5, 1, 128, 32, None, None),
    (14, 2, 64, 8, None, None),
    (16, 1, 64, 64, None, None),
    (12, 12, 64, 16, None, None),
]
STREAMS = [
    Streams(),
    Streams(least=1, near=0, stages=2),
    Streams(per_sm=1, stages=6, least=4, near=4),
]
OF_CODES = [
    *STREAMS,
    Streams(heads=2, per_sm=3, registers=168),
    Streams(rows=128, stages=2),
    Streams(rows=128, heads=1, stages=2),
]
STREAMED = [
    *((dtype, None, streams) for dtype in (BF16, FP16) for streams in STREAMS),
    *((BF16, code, streams) for code in CODES for streams in OF_CODES),
]
LENGTHS = [1, 300, 16, 17, 95, 1000, 31, 260, 5, 2500, 641]


@hopper_only
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, code, streams", STREAMED)
def test_the_streaming_kernel_equals_the_reference(dtype, code, shape, streams, monkeypatch):
    """KRN-10, QNT-18, REG-037. Unused places, also of the last block, are NaN; twice the same bits."""
    table = "STREAMS" if code is None else "QUANTIZED_STREAMS"
    monkeypatch.setattr(hopper_decode, table, ((1 << 30, streams),))
    monkeypatch.setattr(hopper_decode, "LEAST_ROWS", 1)
    for lengths in ([3000], [40] * 70, LENGTHS):
        rows = [(1, length) for length in lengths]
        problem, q, kv, plan, padded = attention_case(shape, dtype, rows, pad_rows=2, pad_tokens=2)
        attended, cache, wide = in_codes(problem, kv, code)
        assert hopper_decode.unfit(attended) is None
        attend = triton_attention.bind(attended)
        out = attend(q, cache, padded)
        assert close(out[: len(rows)], exact(problem, q, wide, plan), dtype)
        again = attend(q, cache, padded)
        assert torch.equal(out[: len(rows)], again[: len(rows)])


@hopper_only
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("decodes", [0, 3, 11, 70])
def test_decodes_beside_prompts_equal_the_reference(shape, decodes):
    """Rows of one query by this kernel, of few and of many by the others, in one step; twice the same bits."""
    rows = [(1, 1 + 97 * i % 700) for i in range(decodes)]
    rows += [(2, 300), (3, 3), (4, 90), (5, 1000), (40, 200), (130, 131)]
    problem, q, kv, plan, padded = attention_case(shape, BF16, rows, pad_rows=9, pad_tokens=5)
    attend, tokens = triton_attention.bind(problem), sum(queries for queries, _ in rows)
    out = attend(q, kv, padded)
    assert close(out[:tokens], exact(problem, q, kv, plan), BF16)
    assert torch.equal(out[:tokens], attend(q, kv, padded)[:tokens])


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
def test_the_streaming_kernel_keeps_nan_in_its_row(code, monkeypatch):
    monkeypatch.setattr(hopper_decode, "LEAST_ROWS", 1)
    problem, q, kv, plan, _ = attention_case(SHAPES[1], BF16, [(1, n) for n in LENGTHS])
    problem, kv, _ = in_codes(problem, kv, code)
    lost = kv if code is None else values_and_scales(kv)[1]
    attend = triton_attention.bind(problem)
    clean = attend(q, kv, plan)
    lost[plan.block_table_RB[5, 2].item()] = NAN
    out = attend(q, kv, plan)
    assert out[5].isnan().all()
    others = [row for row in range(len(LENGTHS)) if row != 5]
    assert torch.equal(out[others], clean[others])


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
@pytest.mark.parametrize("per_sm", [1, 6])
def test_shared_prefixes_do_not_show(per_sm, code, monkeypatch):
    """Beside rows without any, of prefixes in one split and in many."""
    for name, value in (
        ("LEAST_ROWS", 2),
        ("MIN_ROWS", 3),
        ("MIN_TOKENS", 24),
        ("MIN_SPLIT_TOKENS", 16),
    ):
        monkeypatch.setattr(cascade, name, value)
    monkeypatch.setattr(cascade, "PROGRAMS_PER_SM", per_sm)
    monkeypatch.setattr(hopper_decode, "LEAST_ROWS", 1)
    lengths = [150, 1170, 33, 12, 121, 140, 90, 97, 25, 71]
    groups = {0: ([1, 4, 7], 96), 2: ([5, 6, 8, 9], 16)}
    problem, q, kv, plan, padded = shared_case(
        SHAPES[1], BF16, [(1, n) for n in lengths], groups, pad_rows=2, pad_tokens=2
    )
    attended, cache, wide = in_codes(problem, kv, code)
    out = triton_attention.bind(attended)(q, cache, padded)
    assert close(out[: len(lengths)], exact(problem, q, wide, plan), BF16)


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
@pytest.mark.parametrize("rows, queries", [(3, 1), (40, 1), (200, 1), (3, 4), (40, 16)])
def test_the_newest_positions_are_seen(rows, queries, code, monkeypatch):
    """What the kernel asks for before the one that writes the newest keys and values has ended is older than they
    (REG lines on graphs): layers of both in one graph, against the kernel that waits."""
    heads, kv_heads, dim = 32, 8, 128
    lengths, tokens = [queries + 37 * i % 300 for i in range(rows)], rows * queries
    plan, blocks = attention.sample_plan(
        [(queries, n) for n in lengths], block_tokens=16, window=None, device=DEVICE
    )
    new = {"dtype": BF16, "device": DEVICE}
    generator = torch.Generator(DEVICE).manual_seed(2)
    caches = [
        torch.randn(blocks, 2, kv_heads, 16, dim, generator=generator, **new) for _ in range(4)
    ]
    problem = attention.AttentionProblem(
        heads=heads, kv_heads=kv_heads, head_dim=dim, block_tokens=16, scale=dim**-0.5, quantized=code,
        verify_queries=queries, **new,
    )  # fmt: skip
    if code is not None:
        caches = [quantized_cache(kv, code) for kv in caches]
    writing = qk_rope_write.QKRopeWriteProblem(
        heads=heads, kv_heads=kv_heads, head_dim=dim, rotary_dim=0, block_tokens=16, quantized=code, **new,
    )  # fmt: skip
    values = torch.empty(4, tokens, (heads + 2 * kv_heads) * dim, **new)
    positions = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    table = torch.zeros(1, dim, device=DEVICE)
    results = {}
    for least in (1, 1 << 30):
        monkeypatch.setattr(hopper_decode, "LEAST_ROWS", least)
        attends = [triton_attention.bind(problem) for _ in caches]
        writes = triton_qk_rope_write.KERNEL.bind(writing, None, None)

        def layers(attends=attends, writes=writes) -> list[torch.Tensor]:
            found = []
            for attend, kv, qkv in zip(attends, caches, values, strict=True):
                q = writes(qkv, positions, table, kv, plan.slot_T)
                found.append(attend(q, kv, plan))
            return found

        generator = torch.Generator(DEVICE).manual_seed(1)
        values.normal_(generator=generator)
        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = layers()
        results[least] = []
        for _ in range(5):
            values.normal_(generator=generator)
            graph.replay()
            results[least].append(torch.stack(kept))
    for one, other in zip(*results.values(), strict=True):
        assert close(one, other.float(), BF16)


def test_where_it_cannot_run_the_other_kernel_does():
    problem = attention.AttentionProblem(
        device="cpu", dtype=BF16, heads=8, kv_heads=2, head_dim=128, block_tokens=16, scale=1.0
    )
    assert "GPUs" in str(hopper_decode.unfit(problem))
    assert hopper_decode.heads_of(problem, Streams()) == 2
    assert hopper_decode.heads_of(replace(problem, heads=24, kv_heads=12), Streams()) == 4
    assert hopper_decode.heads_of(replace(problem, block_tokens=64), Streams()) == 1


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_log_sum_exps_equal_the_reference(code, shape):
    rows = [(1, length) for length in LENGTHS]
    problem, q, kv, plan, padded = attention_case(shape, BF16, rows, pad_rows=2, pad_tokens=2)
    attended, cache, wide = in_codes(problem, kv, code)
    attend = triton_attention.bind(attended)
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    out = attend(q, cache, padded, lse)
    expected, expected_lse = exact_lse(problem, q[: len(rows)], wide, plan)
    assert close(out[: len(rows)], expected, BF16)
    assert (lse[: len(rows)] - expected_lse).abs().max() < 0.05
    assert torch.equal(attend(q, cache, padded)[: len(rows)], out[: len(rows)])


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
@pytest.mark.parametrize("verify_queries", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queries", [2, 4, 8, 16])
def test_rows_with_few_queries_equal_the_reference(
    shape, queries, verify_queries, code, monkeypatch
):
    """As when drafts are verified, beside rows with one query, by the generic kernel and by this
    one; log-sum-exps; twice the same bits; NaN where nothing was written."""
    rows = [(1, 700), *((1 + i % queries, 20 + 97 * i % 900) for i in range(40))]
    rows = sorted(rows, key=lambda row: row[0] != 1)
    problem, q, kv, plan, padded = attention_case(shape, BF16, rows, pad_rows=7, pad_tokens=5)
    problem = replace(problem, verify_queries=verify_queries)
    attended, cache, wide = in_codes(problem, kv, code)
    padded = replace(padded, max_query_len=queries)
    taken, serves = [], hopper_decode.verified_queries
    monkeypatch.setattr(
        hopper_decode,
        "verified_queries",
        lambda *asked, **size: taken.append(serves(*asked, **size)) or taken[-1],
    )
    attend, tokens = triton_attention.bind(attended), sum(many for many, _ in rows)
    out = attend(q, cache, padded)
    fits = shape[0] // shape[1] * queries <= hopper_decode.MOST_QUERIES
    if triton_attention.few_queries_tiles(attended, padded) is not None:
        assert taken == [queries if fits and verify_queries > 1 else None]
    assert close(out[:tokens], exact(problem, q, wide, plan), BF16)
    assert torch.equal(out[:tokens], attend(q, cache, padded)[:tokens])
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    assert torch.equal(attend(q, cache, padded, lse)[:tokens], out[:tokens])
    _, expected_lse = exact_lse(problem, q[:tokens], wide, plan)
    assert (lse[:tokens] - expected_lse).abs().max() < 0.05
