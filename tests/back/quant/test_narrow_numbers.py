"""Numbers of fewer bits than a kernel's are kept in its bits. QNT-01."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from headrace.back.kernels.linear_int4.layout import dequantize
from headrace.back.parallel.param import Param, WeightPiece, copies
from headrace.back.quant.gpu_int4 import StoredInt4Weight, stored_int4
from tests.back.quant.formats.stored_weights import open_weight

INPUTS, OUTPUTS = 128, 96


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A stream of bits along the first dimension, lowest first, in words of 32."""
    stream = (values[:, None] >> torch.arange(bits)[:, None] & 1).flatten(0, 1)
    packed = (stream.unflatten(0, (-1, 32)).long() << torch.arange(32)[:, None]).sum(1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3])
def test_gptq_of_two_and_three_bits_is_kept_in_four(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    torch.manual_seed(bits)
    values = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS))
    scales = (torch.rand(OUTPUTS, INPUTS // 32) + 0.5).bfloat16().float()
    zeros = torch.full((OUTPUTS, INPUTS // 32), 1 << (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, zeros.shape)
    plain = (values - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    members = {
        "m.qweight": words(values.t(), bits),
        "m.qzeros": words(zeros - 1, bits).t().contiguous(),
        "m.scales": scales.t().contiguous(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric}
    param = Param(
        name="m", shape=(OUTPUTS, INPUTS), dtype=torch.float32,
        pieces=(WeightPiece(name="m.weight", shape=(OUTPUTS, INPUTS)),),
        tensor=torch.empty(OUTPUTS, INPUTS),
    )  # fmt: skip
    with closing(open_weight(tmp_path, config, members)) as source:
        scheme = source.entries["m.weight"].scheme
        assert scheme == ("int4" if symmetric else "int4-asym")
        assert stored_int4(param, {"m.weight": scheme}) == scheme
        weight = StoredInt4Weight(param, scheme)
        (copy,) = copies(param)
        assert param.on_groups is not None
        assert param.on_groups(copy, *source.groups("m.weight", copy.source)) is None
        param.filled()
    torch.testing.assert_close(dequantize(weight.take(), torch.float32), plain)
