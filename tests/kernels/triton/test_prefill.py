"""The list of tiles of a step's long rows, in the interpreter and on a GPU; and the kernel of Hopper that takes its
work from it, which needs the TMA and so a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention import hopper, triton_attention
from headrace.back.kernels.attention import op as attention
from headrace.back.kernels.attention.triton_lists import row_bucket
from headrace.back.kernels.attention.triton_tiles import TILE_FIELDS, tiles_kernel
from headrace.back.kernels.kv_write.quantized import values_and_scales
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.partial_attention import exact as exact_lse
from tests.kernels.triton.test_kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    NAN,
    attention_case,
    close,
    exact,
)
from tests.kernels.triton.test_quantized import CODES, in_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
ON_HOPPER = not interpreted() and torch.cuda.is_available()
ON_HOPPER = ON_HOPPER and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="asks for the TMA of Hopper")


def expected_tiles(rows: list[tuple[int, int]], queries: int, least: int) -> list[tuple[int, ...]]:
    """(row, token, queries, position, length, end), the farthest end first, then by row."""
    found, token = [], 0
    for row, (count, length) in enumerate(rows):
        for first in range(0, count if count >= least else 0, queries):
            taken = min(queries, count - first)
            position = length - count + first
            found.append((row, token + first, taken, position, length, position + taken))
        token += count
    return sorted(found, key=lambda tile: (-tile[5], tile[0]))


@pytest.mark.parametrize("queries, least", [(4, 2), (32, 5), (128, 17)])
def test_tiles_are_listed_the_longest_first(queries, least):
    generator = torch.Generator().manual_seed(queries)

    def below(limit: int) -> int:
        return int(torch.randint(1, limit, (), generator=generator))

    for count in (1, 7, 40):
        rows = [(below(min(90, 8 * queries)), below(400)) for _ in range(count)]
        rows = [(min(taken, length), length) for taken, length in rows] + [(0, 0)] * 2
        expected = expected_tiles(rows, queries, least)
        starts = torch.tensor([0, *(taken for taken, _ in rows)]).cumsum(0).int()
        lengths = torch.tensor([length for _, length in rows]).int()
        most = -(-int(starts[-1]) // queries) + len(rows)
        tiles = torch.full(((most + 1) * TILE_FIELDS,), -1, dtype=torch.int32, device=DEVICE)
        tiles_kernel[(most,)](
            starts.to(DEVICE), lengths.to(DEVICE), tiles, len(rows), QUERIES=queries,
            MIN_QUERIES=least, ROWS=row_bucket(len(rows)), DEPENDENT=False,
        )  # fmt: skip
        assert int(tiles[0]) == len(expected)
        got = tiles.view(-1, TILE_FIELDS)[1 : len(expected) + 1, :6]
        assert [tuple(tile) for tile in got.tolist()] == expected


# heads, KV heads, head_dim, block_tokens, window, soft cap
HOPPER_SHAPES = [
    (8, 2, 128, 16, None, None),
    (5, 1, 128, 32, None, None),
    (2, 2, 64, 8, None, None),
    (16, 1, 64, 128, None, None),
    (7, 1, 128, 64, None, None),
]
VARIANTS = [
    (BF16, (8, 2, 128, 16, 300, 30.0), False),
    (FP16, (5, 1, 64, 16, -200, None), True),
    (BF16, (8, 4, 256, 16, None, None), True),
    (FP16, (6, 2, 256, 32, 100, 50.0), False),
    (BF16, (8, 2, 128, 16, 1, None), True),
    (BF16, (4, 4, 128, 8, -64, None), False),
]
"""Windows, of one position too, chunks (negative), soft caps, heads of 256, and sinks."""
HOPPER_ROWS = [(1, 1), (1, 300), (40, 95), (6, 6), (5, 260), (129, 129), (300, 1000), (127, 641)]


@hopper_only
@pytest.mark.parametrize("dtype, code", [(BF16, None), (FP16, None), (BF16, "int8"), (BF16, "fp8")])
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
def test_the_tma_kernel_equals_the_reference(dtype, code, shape):
    """KRN-10, QNT-18, REG-037. Unused places, also of the last block, are NaN; twice the same bits."""
    problem, q, kv, plan, padded = attention_case(
        shape, dtype, HOPPER_ROWS, pad_rows=2, pad_tokens=3
    )
    attended, cache, wide = in_codes(problem, kv, code)
    assert hopper.unfit(attended) is None
    attend = triton_attention.bind(attended)
    out = attend(q, cache, padded)
    expected = exact(problem, q, wide, plan)
    assert close(out[: len(expected)], expected, dtype)
    assert torch.equal(out[: len(expected)], attend(q, cache, padded)[: len(expected)])


@hopper_only
@pytest.mark.parametrize("dtype, shape, sinks", VARIANTS)
def test_the_tma_kernel_with_windows_caps_sinks_and_wide_heads_equals_the_reference(
    dtype, shape, sinks
):
    """KRN-10: blocks that a window has left behind are the null block, which is NaN, and so are the unused places of
    a block that stands in their place."""
    problem, q, kv, plan, padded = attention_case(
        shape, dtype, HOPPER_ROWS, pad_rows=2, pad_tokens=3
    )
    problem = replace(problem, sinks=sinks)
    assert hopper.unfit(problem) is None
    sink = torch.randn(shape[0], generator=torch.Generator().manual_seed(5)).to(DEVICE)
    given = (sink,) if sinks else ()
    attend, tokens = triton_attention.bind(problem, *given), int(plan.query_start_R1[-1])
    lse = torch.full(q.shape[:2], NAN, device=q.device)
    out = attend(q, kv, padded, lse)
    wide = attention.OP.reference.bind(replace(problem, dtype=FP32), *given)
    expected_lse = torch.full((tokens, shape[0]), NAN, device=q.device)
    expected = wide(q[:tokens].float(), kv.float(), plan, expected_lse)
    assert close(out[:tokens], expected, dtype)
    assert (lse[:tokens] - expected_lse).abs().max() < 0.05
    assert torch.equal(out[:tokens], attend(q, kv, padded)[:tokens])


@hopper_only
def test_rows_of_more_tokens_take_longer_tiles(monkeypatch):
    """KRN-10: both sizes of tiles, by the tokens of a row, with the same result but for rounding."""
    shape, rows = (8, 2, 128, 16, None, None), [(70, 70), (50, 333), (90, 100)]
    problem, q, kv, plan, _ = attention_case(shape, BF16, rows)
    expected = exact(problem, q, kv, plan)
    taken = []
    tiles_for = hopper.tiles_for
    monkeypatch.setattr(
        hopper, "tiles_for", lambda *given: taken.append(tiles_for(*given)) or taken[-1]
    )
    for tokens in (0, 1 << 20):
        assert close(
            triton_attention.bind(problem, short_tokens=tokens)(q, kv, plan), expected, BF16
        )
    assert {hopper.TILES, hopper.SHORT_TILES} <= set(taken)


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
def test_the_tma_kernel_keeps_nan_in_its_row(code):
    shape, rows = (8, 2, 128, 16, None, None), [(70, 70), (50, 333), (90, 100)]
    problem, q, kv, plan, _ = attention_case(shape, BF16, rows)
    problem, kv, _ = in_codes(problem, kv, code)
    lost = kv if code is None else values_and_scales(kv)[1]
    attend = triton_attention.bind(problem)
    clean = attend(q, kv, plan)
    lost[plan.block_table_RB[1, 2].item()] = NAN
    out = attend(q, kv, plan)
    assert out[70:120].isnan().all()
    assert torch.equal(out[:70], clean[:70]) and torch.equal(out[120:], clean[120:])


@hopper_only
@pytest.mark.parametrize("code", [None, *CODES])
@pytest.mark.parametrize("shape", HOPPER_SHAPES[:3])
def test_log_sum_exps_equal_the_reference(code, shape):
    problem, q, kv, plan, padded = attention_case(
        shape, BF16, HOPPER_ROWS, pad_rows=2, pad_tokens=3
    )
    attended, cache, wide = in_codes(problem, kv, code)
    attend, tokens = triton_attention.bind(attended), int(plan.query_start_R1[-1])
    lse = torch.full(q.shape[:2], NAN, device=q.device)
    out = attend(q, cache, padded, lse)
    expected, expected_lse = exact_lse(problem, q[:tokens], wide, plan)
    assert close(out[:tokens], expected, BF16)
    assert (lse[:tokens] - expected_lse).abs().max() < 0.05
    assert torch.equal(attend(q, cache, padded)[:tokens], out[:tokens])
