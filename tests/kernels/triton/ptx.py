"""Executes the few instructions of PTX that our inline assembly consists of, on tensors of the host."""

from __future__ import annotations

import re

import torch


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
