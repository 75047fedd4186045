"""Native kernels of attention over chosen positions and groups against their references (KRN-03, KRN-04, KRN-05)."""

import pytest
import torch

from headrace.back.kernels.attention.op import sample_plan
from headrace.back.kernels.compressed_attention import native as compressed
from headrace.back.kernels.compressed_attention import op as compressed_op
from headrace.back.kernels.compressed_attention.op import CompressedProblem
from headrace.back.kernels.group_select import native as group_select
from headrace.back.kernels.group_select import op as group_select_op
from headrace.back.kernels.group_select.op import GroupSelectProblem
from headrace.back.kernels.group_write import native as group_write
from headrace.back.kernels.group_write import op as group_write_op
from headrace.back.kernels.group_write.op import GroupWriteProblem
from headrace.back.kernels.index_select import native as index_select
from headrace.back.kernels.index_select import op as index_select_op
from headrace.back.kernels.index_select.op import IndexSelectProblem
from headrace.back.kernels.index_write import native as index_write
from headrace.back.kernels.index_write import op as index_write_op
from headrace.back.kernels.index_write.op import IndexWriteProblem
from headrace.back.kernels.op import Kernel
from headrace.back.kernels.sparse_attention import native as sparse_heads
from headrace.back.kernels.sparse_attention import op as sparse_heads_op
from headrace.back.kernels.sparse_attention.op import SparseAttentionProblem
from headrace.back.kernels.sparse_latent_attention import native as sparse_attention
from headrace.back.kernels.sparse_latent_attention import op as sparse_attention_op
from headrace.back.kernels.sparse_latent_attention.op import SparseLatentProblem

BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def kernel_of(bind):
    return Kernel(name="one", supports=lambda problem: None, bind=bind)


@pytest.mark.parametrize("layout", ["half", "pairs"])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 13, 6), (8, 128, 64)])
def test_keys_are_normed_rotated_and_written(library, heads, dim, rotary, dtype, layout):
    kernel = kernel_of(lambda *given: index_write.bind_with(library, *given))
    problem = IndexWriteProblem(
        device="cpu", dtype=dtype, heads=heads, dim=dim, rotary=rotary, block_tokens=4, eps=1e-6,
        layout=layout,
    )  # fmt: skip
    assert index_write_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("heads", "dim", "top_k"), [(3, 13, 7), (8, 128, 64), (5, 16, 4096)])
def test_the_chosen_positions_are_those_of_the_reference(library, heads, dim, top_k, dtype):
    """Rounded scores are full of ties."""
    kernel = kernel_of(lambda *given: index_select.bind_with(library, *given))
    problem = IndexSelectProblem(
        device="cpu", dtype=dtype, heads=heads, dim=dim, top_k=top_k, block_tokens=16
    )
    assert index_select_op.OP.error(kernel, problem) == 0


def test_long_rows_of_few_tokens_are_scored_in_parts_by_several_threads(library):
    problem = IndexSelectProblem(
        device="cpu", dtype=torch.float32, heads=5, dim=16, top_k=50, block_tokens=16
    )
    sample = index_select_op.sample_of(problem, [[(1, 3000), (1, 40), (3, 2049), (1, 1)]])
    select = index_select.bind_with(library, problem)
    chosen_TK = select(*sample.arguments)
    assert torch.equal(chosen_TK, index_select_op.bind_reference(problem)(*sample.arguments))
    library.set_threads(1)
    assert torch.equal(chosen_TK, select(*sample.arguments))


def test_what_stands_behind_a_query_changes_nothing_and_padding_chooses_nothing(library):
    """REG-033: what later chunks have left in the cache is not looked at."""
    problem = IndexSelectProblem(
        device="cpu", dtype=torch.float32, heads=3, dim=8, top_k=5, block_tokens=4
    )
    plan, blocks = sample_plan([(1, 6), (3, 9)], block_tokens=4, window=None, device="cpu")
    generator = torch.Generator().manual_seed(4)
    q_TJI, weight_TJ = (torch.randn(7, *rest, generator=generator) for rest in ((3, 8), (3,)))
    keys = torch.randn(blocks, 4, 8, generator=generator)
    select = index_select.bind_with(library, problem)
    chosen_TK = select(q_TJI, weight_TJ, keys, plan)
    for row, length in ((0, 6), (1, 9)):
        keys[plan.block_table_RB[row, length // 4], length % 4 :] = float("nan")
    keys[0] = float("inf")
    assert torch.equal(select(q_TJI, weight_TJ, keys, plan), chosen_TK)
    assert (chosen_TK[4:] == -1).all() and (chosen_TK[:4] >= 0).all()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(3, 13, 6), (6, 512, 64)])
def test_attention_over_chosen_positions_equals_the_reference(library, heads, rank, rotary, dtype):
    kernel = kernel_of(lambda *given: sparse_attention.bind_with(library, *given))
    problem = SparseLatentProblem(
        device="cpu", dtype=dtype, heads=heads, rank=rank, rotary=rotary, top_k=21,
        block_tokens=16, scale=(rank + rotary) ** -0.5,
    )  # fmt: skip
    assert sparse_attention_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lists"), [(6, 2, 13, 2), (10, 2, 128, 1), (3, 3, 64, 3)]
)
def test_heads_over_chosen_positions_equal_the_reference(
    library, heads, kv_heads, head_dim, lists, dtype
):
    kernel = kernel_of(lambda *given: sparse_heads.bind_with(library, *given))
    problem = SparseAttentionProblem(
        device="cpu", dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, lists=lists,
        top_k=21, block_tokens=16, scale=head_dim**-0.5,
    )  # fmt: skip
    assert sparse_heads_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("heads", "dim", "group", "top_k", "best_key", "local"),
    [
        *((3, 13, 4, 3, False, 0), (8, 128, 16, 40, False, 0), (5, 16, 64, 2, False, 0)),
        *((6, 13, 4, 5, True, 2), (4, 128, 16, 3, True, 1), (1, 16, 64, 2, True, 0)),
    ],
)
def test_the_chosen_groups_are_those_of_the_reference(
    library, heads, dim, group, top_k, best_key, local, dtype
):
    """Groups within a block, a block, and of four blocks; rounded scores are full of ties."""
    kernel = kernel_of(lambda *given: group_select.bind_with(library, *given))
    problem = GroupSelectProblem(
        device="cpu", dtype=dtype, heads=heads, dim=dim, group=group, top_k=top_k, block_tokens=16,
        best_key=best_key, local=local,
    )  # fmt: skip
    assert group_select_op.OP.error(kernel, problem) == 0


def test_many_groups_of_few_tokens_are_scored_in_parts_by_several_threads(library):
    problem = GroupSelectProblem(
        device="cpu", dtype=torch.float32, heads=5, dim=16, group=2, top_k=50, block_tokens=16
    )
    rows = [(1, 5000), (3, 2200), (1, 1)]
    plan, blocks = sample_plan(rows, block_tokens=16, window=None, device="cpu")
    new = {"generator": torch.Generator().manual_seed(8)}
    q_TJI, weight_TJ, entries = (
        torch.randn(*shape, **new).round_() for shape in ((5, 5, 16), (5, 5), (blocks, 8, 16))
    )
    select = group_select.bind_with(library, problem)
    chosen_TGK = select(q_TJI, weight_TJ, entries, plan)
    expected = group_select_op.bind_reference(problem)(q_TJI, weight_TJ, entries, plan)
    assert torch.equal(chosen_TGK, expected)
    library.set_threads(1)
    assert torch.equal(chosen_TGK, select(q_TJI, weight_TJ, entries, plan))


@pytest.mark.parametrize("best_key", [False, True])
def test_entries_of_groups_that_are_not_whole_are_not_looked_at(library, best_key):
    """REG-033 for groups: a query at position 8 sees two entries of four, or nine keys."""
    problem = GroupSelectProblem(
        device="cpu", dtype=torch.float32, heads=3, dim=8, group=4, top_k=1, block_tokens=4,
        best_key=best_key, local=int(best_key),
    )  # fmt: skip
    plan, blocks = sample_plan([(1, 6), (3, 9)], block_tokens=4, window=None, device="cpu")
    generator = torch.Generator().manual_seed(4)
    q_TJI, weight_TJ = (torch.randn(7, *rest, generator=generator) for rest in ((3, 8), (3,)))
    entries = torch.randn(blocks, 4 if best_key else 1, 8, generator=generator)
    select = group_select.bind_with(library, problem)
    chosen_TGK = select(q_TJI, weight_TJ, entries, plan)
    for row, length in ((0, 6), (1, 9)):
        entries[plan.block_table_RB[row, length // 4], length % 4 if best_key else 0 :] = float(
            "nan"
        )
    entries[0] = float("inf")
    assert torch.equal(select(q_TJI, weight_TJ, entries, plan), chosen_TGK)
    assert (chosen_TGK[4:] == -1).all() and (chosen_TGK[:4] >= 0).all()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    "facts",
    [
        {"width": 13, "group": 4},
        {"width": 128, "group": 16, "eps": 1e-6, "rotary": 64, "layout": "pairs", "offset": 64},
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
        {"width": 16, "group": 64, "gated": True, "series": 2},
    ],
)
def test_entries_equal_those_of_the_reference(library, facts, dtype):
    kernel = kernel_of(lambda *given: group_write.bind_with(library, *given))
    problem = GroupWriteProblem(device="cpu", dtype=dtype, block_tokens=16, **facts)
    assert group_write_op.OP.error(kernel, problem) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "group", "top_k"),
    [(3, 13, 5, 4, 7), (6, 128, 24, 64, 0), (10, 64, 16, 16, 0), (4, 32, 700, 0, 0)],
)
def test_a_window_and_entries_in_one_softmax_equal_the_reference(
    library, heads, head_dim, window, group, top_k, dtype
):
    kernel = kernel_of(lambda *given: compressed.bind_with(library, *given))
    problem = CompressedProblem(
        device="cpu", dtype=dtype, heads=heads, head_dim=head_dim, window=window, group=group,
        top_k=top_k, block_tokens=16, scale=head_dim**-0.5,
    )  # fmt: skip
    assert compressed_op.OP.error(kernel, problem) <= BOUND[dtype]
