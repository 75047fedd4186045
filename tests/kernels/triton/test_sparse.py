"""Triton kernels of chosen positions and groups against their references (KRN-03 to KRN-05); see test_kernels.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.compressed_attention import op as compressed
from headrace.back.kernels.compressed_attention import triton_compressed_attention
from headrace.back.kernels.compressed_attention.op import CompressedProblem
from headrace.back.kernels.group_select import op as group_select
from headrace.back.kernels.group_select import triton_group_select
from headrace.back.kernels.group_select.op import GroupSelectProblem
from headrace.back.kernels.group_write import op as group_write
from headrace.back.kernels.group_write import triton_group_write
from headrace.back.kernels.group_write.op import GroupWriteProblem
from headrace.back.kernels.index_select import op as index_select
from headrace.back.kernels.index_select import triton_index_select
from headrace.back.kernels.index_select.op import IndexSelectProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.triton.wrap import interpreted
from tests.kernels.triton import test_kernels
from tests.kernels.triton.test_kernels import BOUND, DEVICE, DTYPES

pytestmark = test_kernels.pytestmark


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim, top_k", [(3, 24, 7), (20, 64, 300), (5, 16, 4096)])
def test_the_chosen_positions_are_those_of_the_reference(heads, dim, top_k, dtype):
    """Rounded scores are full of ties."""
    problem = IndexSelectProblem(
        device=DEVICE, dtype=dtype, heads=heads, dim=dim, top_k=top_k, block_tokens=16
    )
    assert index_select.OP.error(triton_index_select.KERNEL, problem) == 0


SMALLER = (pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((70, 64), (5, 16)))


@pytest.mark.parametrize(("top_k", "part"), [(300, 128), *SMALLER])
def test_long_rows_are_selected_from_by_candidates(top_k, part):
    """KRN-04: with ties in several parts, rows of one part, and rows that see no more than they choose; by candidates,
    and where a sample leads to too many or too few."""
    problem = IndexSelectProblem(
        device=DEVICE, dtype=torch.float32, heads=3, dim=16, top_k=top_k, block_tokens=16
    )
    kernel = Kernel(
        name="parts",
        supports=lambda problem: None,
        bind=partial(triton_index_select.bind, part=part),
    )
    assert index_select.OP.error(kernel, problem) == 0


@pytest.mark.parametrize(
    "case", ["random", "alike", "high where it samples", "low where it samples"]
)
def test_candidates_are_left_where_a_sample_misleads(case):
    """KRN-04: too few or too many reach the bound, and one row is shorter."""
    part, top_k, lengths = 64, 20, (1000, 300)
    select = triton_index_select.EntrySelect(
        heads=1, dim=16, top_k=top_k, group=1, block_tokens=16, part=part
    )
    plan, _ = sample_plan([(1, n) for n in lengths], block_tokens=16, window=None, device=DEVICE)
    scores = torch.randint(-99, 99, (2, 1000), generator=torch.Generator().manual_seed(3)).int()
    if case == "alike":
        scores[:] = 7
    for row, length in enumerate(lengths):
        sampled = torch.arange(part) * length // part
        if case.endswith("it samples"):
            scores[row, sampled] += 1000 if case.startswith("high") else -1000
        if case.startswith("high"):
            scores[row, sampled[top_k - 5 :]] -= 2000
        scores[row, length:] = 2**31 - 1
    chosen = torch.empty((2, top_k), dtype=torch.int32, device=DEVICE)
    select.select_long(scores.to(DEVICE), chosen, plan, 0)
    positions = torch.tensor(lengths)[:, None] - 1
    assert torch.equal(chosen.cpu(), index_select.best_positions(scores.float(), positions, top_k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "group", "top_k", "best_key", "local"),
    [
        *((3, 24, 4, 3, False, 0), (5, 16, 64, 2, False, 0), (1, 16, 64, 2, True, 0)),
        pytest.param(20, 64, 16, 20, False, 0, marks=pytest.mark.slow),
        pytest.param(6, 24, 8, 5, True, 2, marks=pytest.mark.slow),
        pytest.param(20, 64, 16, 3, True, 1, marks=pytest.mark.slow),
    ],
)
def test_the_chosen_groups_are_those_of_the_reference(
    heads, dim, group, top_k, best_key, local, dtype
):
    problem = GroupSelectProblem(
        device=DEVICE, dtype=dtype, heads=heads, dim=dim, group=group, top_k=top_k, block_tokens=16,
        best_key=best_key, local=local,
    )  # fmt: skip
    assert group_select.OP.error(triton_group_select.KERNEL, problem) == 0


def test_what_stands_behind_a_query_changes_nothing_and_scores_are_kept_in_parts(monkeypatch):
    """REG-033, KRN-05: what later chunks have left in the cache is not looked at, nor what stands in
    the scores behind a row's own."""
    problem = IndexSelectProblem(
        device=DEVICE, dtype=torch.float32, heads=3, dim=16, top_k=5, block_tokens=4
    )
    plan, blocks = sample_plan([(1, 6), (3, 9)], block_tokens=4, window=None, device=DEVICE)
    generator = torch.Generator().manual_seed(4)
    q_TJI, weight_TJ = (
        torch.randn(7, *rest, generator=generator).to(DEVICE) for rest in ((3, 16), (3,))
    )
    keys = torch.randn(blocks, 4, 16, generator=generator).to(DEVICE)
    select = triton_index_select.bind(problem)
    chosen_TK = select(q_TJI, weight_TJ, keys, plan)
    for row, length in ((0, 6), (1, 9)):
        keys[plan.block_table_RB[row, length // 4], length % 4 :] = float("nan")
    keys[0] = float("inf")
    monkeypatch.setattr(triton_index_select, "KEPT", 20)
    monkeypatch.setattr(torch, "empty", lambda *shape, **new: torch.full(*shape, 2**31 - 1, **new))
    assert torch.equal(select(q_TJI, weight_TJ, keys, plan), chosen_TK)
    assert (chosen_TK[4:] == -1).all() and (chosen_TK[:4] >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "facts",
    [
        {"width": 24, "group": 4},
        {"width": 64, "group": 16, "eps": 1e-6, "rotary": 32, "layout": "pairs", "offset": 32},
        {"width": 24, "group": 8, "gated": True, "eps": 1e-6, "rotary": 6},
        {
            "width": 40,
            "group": 4,
            "gated": True,
            "series": 2,
            "eps": 1e-6,
            "rotary": 8,
            "offset": 32,
        },
        {"width": 16, "group": 32, "gated": True, "series": 2},
    ],
)
def test_entries_equal_those_of_the_reference(facts, dtype):
    problem = GroupWriteProblem(device=DEVICE, dtype=dtype, block_tokens=16, **facts)
    assert group_write.OP.error(triton_group_write.KERNEL, problem) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "group", "top_k"),
    [(3, 24, 5, 4, 40), (20, 64, 40, 64, 0), (4, 32, 24, 16, 0), (4, 32, 700, 0, 0)],
)
def test_a_window_and_entries_in_one_softmax_equal_the_reference(
    heads, head_dim, window, group, top_k, dtype
):
    problem = CompressedProblem(
        device=DEVICE, dtype=dtype, heads=heads, head_dim=head_dim, window=window, group=group,
        top_k=top_k, block_tokens=16, scale=head_dim**-0.5,
    )  # fmt: skip
    assert compressed.OP.error(triton_compressed_attention.KERNEL, problem) <= BOUND[dtype]


def test_rows_are_left_whole_where_the_check_of_parts_fails(monkeypatch):
    problem = IndexSelectProblem(
        device=DEVICE, dtype=torch.float32, heads=3, dim=16, top_k=33, block_tokens=16
    )
    whole, parts = triton_index_select.KERNEL.plans(problem)
    assert whole.skip is None and (whole.name, parts.name) == (
        "rows by a program each", "long rows by candidates",
    )  # fmt: skip
    monkeypatch.setattr(triton_index_select, "_whole", set())
    parts.skip("it disagrees")
    monkeypatch.setattr(triton_index_select, "count_part_kernel", None)
    q_TJI, weight_TJ, keys, plan = index_select.sample_of(problem, [[(1, 300)]]).arguments
    chosen_TK = triton_index_select.bind(problem, part=64)(q_TJI, weight_TJ, keys, plan)
    reference = index_select.bind_reference(problem)
    assert torch.equal(chosen_TK, reference(q_TJI, weight_TJ, keys, plan))


@pytest.mark.skipif(interpreted(), reason="takes minutes in the interpreter")
def test_both_plans_pass_at_the_size_of_a_model():
    problem = IndexSelectProblem(
        device=DEVICE, dtype=torch.bfloat16, heads=64, dim=128, top_k=2048, block_tokens=64
    )
    assert index_select.OP.failures(triton_index_select.KERNEL, problem) == []


@pytest.mark.skipif(interpreted(), reason="there are no graphs in the interpreter")
@pytest.mark.parametrize("capacity", [3000, 3 * triton_index_select.PART])
def test_a_recorded_choice_follows_the_lengths(capacity):
    """KRN-04: one graph, whatever the rows have grown to."""
    problem = IndexSelectProblem(
        device=DEVICE, dtype=torch.float32, heads=4, dim=16, top_k=64, block_tokens=16
    )
    plan, blocks = sample_plan([(1, capacity)] * 3, block_tokens=16, window=None, device=DEVICE)
    new = {"generator": torch.Generator().manual_seed(5)}
    q_TJI, weight_TJ, keys = (
        torch.randn(*shape, **new).round_().to(DEVICE)
        for shape in ((3, 4, 16), (3, 4), (blocks, 16, 16))
    )
    select, reference = triton_index_select.bind(problem), index_select.bind_reference(problem)
    recorded = replace(plan, host_query_start=None, host_kv_len=None)
    select(q_TJI, weight_TJ, keys, recorded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen_TK = select(q_TJI, weight_TJ, keys, recorded)
    for lengths in ((capacity, 1, 65), (64, capacity - 1, 700)):
        plan.kv_len_R.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        now = replace(plan, host_kv_len=np.array(lengths, np.int32))
        assert torch.equal(chosen_TK, reference(q_TJI, weight_TJ, keys, now))
