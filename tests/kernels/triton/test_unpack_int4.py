"""What the assembly of linear_int4/gluon_unpack.py makes of packed words, instruction by instruction: no interpreter of
Triton knows inline assembly. QNT-03."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from headrace.back.kernels.linear_int4 import gluon_unpack
from headrace.back.kernels.linear_int4.layout import (
    block_groups,
    dequantize,
    empty,
    write,
)
from tests.kernels.triton.ptx import halves, run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("minima, floats", [(False, False), (True, False), (False, True)])
def test_words_become_the_numbers_of_the_definition(group, minima, floats, dtype):
    if floats and dtype is torch.float16:
        pytest.skip("e2m1 numbers are multiplied in bfloat16")
    generator = torch.Generator().manual_seed(5)
    weight = empty(64, 128, group, minima=minima, dtype=dtype, device="cpu", floats=floats)
    values = torch.randint(0, 16, (64, 128), generator=generator)
    groups = block_groups(group)
    scales = torch.exp2(torch.randint(-9, -2, (64, groups), generator=generator).float())
    scales = scales * (1 if floats else 1.25)
    write(weight, 0, values, scales, scales * 7.5 if minima else None)
    # half block, warp, lane / 4, lane % 4, word
    words = weight.words_NBW.view(2, 4, 8, 4, 4)
    numbers = weight.scales_NBSR.view(2 if minima else 1, 2, groups, 4, 8)
    # part, e1, half block, sixteen inputs, warp, lane / 4
    spread = numbers.repeat_interleave(8 // groups, 2).view(-1, 2, 2, 4, 4, 8)
    spread = spread.permute(0, 1, 2, 4, 5, 3)[:, :, :, :, :, None, :].expand(-1, -1, *words.shape)
    spread = torch.stack([spread[0], *-spread[1:]])
    made = []
    for pair in range(0, 4, 2):
        registers = {f"${8 + word}": words[..., pair + word].contiguous() for word in range(2)}
        for part in range(len(spread)):
            for e1 in range(2):
                both = spread[part, e1, ..., pair : pair + 2].contiguous()
                registers[f"${10 + 2 * part + e1}"] = both.view(torch.int32)[..., 0]
        half = dtype is torch.float16
        assembly = (
            gluon_unpack.assembly_floats(group == 16)
            if floats
            else gluon_unpack.assembly(half, minima, group == 16)
        )
        run(assembly, registers)
        outs = [halves(registers[f"${i}"][..., None], dtype) for i in range(8)]
        made.append(torch.stack(outs, -2).unflatten(-2, (2, 2, 2)))
    # half block, warp, lane / 4, lane % 4, upper sixteen inputs, lower, e2, e1, e0
    found = torch.stack(made, 4).permute(1, 7, 2, 0, 4, 5, 6, 3, 8).reshape(64, 128)
    assert torch.equal(
        found.double() * (2.0**16 if floats else 1), dequantize(weight, dtype).double()
    )
