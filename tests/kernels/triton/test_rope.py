"""Triton kernels that rotate and write against their references (KRN-08 for layers that cannot do both in one kernel);
see test_kernels.py."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headrace.back.kernels.index_write import op as index_write
from headrace.back.kernels.index_write import triton_index_write
from headrace.back.kernels.index_write.op import IndexWriteProblem
from headrace.back.kernels.kv_write import op as kv_write
from headrace.back.kernels.kv_write import triton_kv_write
from headrace.back.kernels.kv_write.op import KVWriteProblem
from headrace.back.kernels.rope import op as rope
from headrace.back.kernels.rope import triton_rope
from headrace.back.kernels.rope.op import RopeProblem
from tests.kernels.triton import test_kernels
from tests.kernels.triton.test_kernels import BOUND, DEVICE, DTYPES

pytestmark = test_kernels.pytestmark


@pytest.mark.parametrize("layout", ["half", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(20, 12), (128, 128), (80, 80)])
def test_heads_are_rotated_in_place(head_dim, rotary, dtype, layout):
    problem = RopeProblem(
        device=DEVICE, dtype=dtype, head_dim=head_dim, rotary_dim=rotary, layout=layout
    )
    assert rope.OP.error(triton_rope.KERNEL, problem) <= BOUND[dtype]


def test_queries_alone_and_more_heads_than_a_program_takes():
    problem = RopeProblem(device=DEVICE, dtype=torch.float32, head_dim=16, rotary_dim=16)
    generator = torch.Generator().manual_seed(3)
    x_THD = torch.randn(5, 21, 16, generator=generator).to(DEVICE)
    angles = torch.randn(40, 8, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    position = torch.tensor([39, 0, 7, 7, 1], device=DEVICE)
    ours, expected = x_THD.clone(), x_THD.clone()
    triton_rope.bind(problem)(ours[:, :19], ours[:, :0], position, table)
    rope.bind_reference(problem)(expected[:, :19], expected[:, :0], position, table)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[:, 19:], x_THD[:, 19:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_tokens"), [(3, 20, 4), (8, 128, 16)])
def test_keys_and_values_are_written(kv_heads, head_dim, block_tokens, dtype):
    problem = KVWriteProblem(
        device=DEVICE, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens
    )
    assert kv_write.OP.error(triton_kv_write.KERNEL, problem) == 0
    quantized = KVWriteProblem(
        device=DEVICE, dtype=dtype, kv_heads=2, head_dim=32, block_tokens=16, quantized="int8"
    )
    assert triton_kv_write.KERNEL.supports(quantized) == "writes no caches of int8"


@pytest.mark.parametrize("layout", ["half", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "rotary", "offset"), [(3, 13, 6, 0), (20, 128, 64, 64)])
def test_keys_of_an_indexer_are_normed_rotated_and_written(
    heads, dim, rotary, offset, dtype, layout
):
    problem = IndexWriteProblem(
        device=DEVICE, dtype=dtype, heads=heads, dim=dim, rotary=rotary, offset=offset,
        block_tokens=4, eps=1e-6, layout=layout,
    )  # fmt: skip
    assert index_write.OP.error(triton_index_write.KERNEL, problem) <= BOUND[dtype]
