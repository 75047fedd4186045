"""Native kernels of sparse latent attention against their references (KRN-03, KRN-04, KRN-05)."""

import pytest
import torch

from headrace.back.kernels.attention.op import sample_plan
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
