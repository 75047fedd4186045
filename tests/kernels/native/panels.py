"""What the tests of products with packed int8 and e4m3 weights share: random inputs, the definition, its bounds."""

from __future__ import annotations

import torch

from headrace.back.kernels.linear_quant import op

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_for(asked, seed=1):
    return op.random_weight(asked, torch.Generator().manual_seed(seed))


def defined(asked, weight, bias, x):
    """The definition's result before it is rounded to the dtype."""
    wide = None if bias is None else bias.float()
    return op.bind_reference(asked, weight, wide)(x.float())


def close(ours, exact, dtype):
    bound = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
    error = (ours.double() - exact.double()).abs().max() / exact.double().abs().max()
    assert error <= bound, error
