"""What the assembly of linear_int4/gluon_unpack.py makes of packed words, instruction by instruction: no interpreter of
Triton knows inline assembly. QNT-03."""

from __future__ import annotations

import re

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


def halves(register: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return register.contiguous().view(torch.int16).view(dtype)


def binary(register: torch.Tensor) -> torch.Tensor:
    return register.view(torch.int16).view(torch.int32)


def run(lines: str, registers: dict[str, torch.Tensor]) -> None:
    """Executes PTX on registers of int32, each for all threads."""

    def read(name: str) -> torch.Tensor:
        if name.startswith("0x"):
            number = int(name, 16)
            return torch.tensor(
                number - (1 << 32) if number >= 1 << 31 else number, dtype=torch.int32
            )
        return registers[name] if name in registers else torch.tensor(int(name), dtype=torch.int32)

    for line in lines.strip("{} \n").split("\n"):
        for statement in filter(None, (part.strip() for part in line.split(";"))):
            name, *operands = re.split(r"[ ,]+", statement)
            if name == ".reg":
                continue
            target, (a, *more) = operands[0], [read(one) for one in operands[1:]]
            wide = a.long() & 0xFFFFFFFF
            if name == "mov.b32":
                result = a
            elif name == "shr.b32":
                result = (wide >> more[0].long()).to(torch.int32)
            elif name == "shl.b32":
                result = (wide << more[0].long()).to(torch.int32)
            elif name == "and.b32":
                result = a & more[0]
            elif name == "lop3.b32":
                assert operands[-1] == "0xea"  # (a & b) | c
                result = (a & more[0]) | more[1]
            elif name == "prmt.b32":
                both = wide | (more[0].long() & 0xFFFFFFFF) << 32
                places = [int(digit, 16) for digit in operands[-1][2:][::-1]]
                parts = [(both >> 8 * place & 255) << 8 * i for i, place in enumerate(places)]
                result = sum(parts).to(torch.int32)
            else:
                kind = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[name.rsplit(".", 1)[1]]
                x, *others = (halves(one.expand(a.shape), kind).double() for one in (a, *more))
                number = {
                    "sub": lambda p, q: p - q,
                    "mul": lambda p, q: p * q,
                    "fma": lambda p, q, r: p * q + r,
                }[name.split(".")[0]](x, *others)
                result = binary(number.to(kind))
            registers[target] = result.to(torch.int32)


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
