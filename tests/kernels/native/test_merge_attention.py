"""The native merge of partial attention against the formula."""

import pytest
import torch

from headrace.back.kernels.merge_attention.native import bind_with
from headrace.back.kernels.merge_attention.op import MergeAttentionProblem
from tests.kernels.test_merge_attention import check_merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [20, 128])
def test_it_equals_the_formula(library, dtype, head_dim):
    problem = MergeAttentionProblem(device="cpu", dtype=dtype, heads=9, head_dim=head_dim)
    bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    check_merge(bind_with(library, problem), problem, bound)
