"""What Hopper's machine code hands to its matrix unit: descriptors of tiles in shared memory (PTX ISA, "matrix
descriptor"), worked out from the instructions on uniform registers before each product."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

WORD = (1 << 32) - 1
WIDTH = {1: 128, 2: 64, 3: 32}
"""Bytes of a row of a tile by the descriptor's kind of swizzle."""


class UniformRegisters:
    """Their values as far as they follow from constants and the address of shared memory."""

    def __init__(self) -> None:
        self.values: dict[str, int | None] = {"URZ": 0}
        self.carries: dict[str, int | None] = {"!UPT": 0}

    def value(self, word: str) -> int | None:
        if "UR" not in word:
            return int(word, 0) & WORD if re.fullmatch(r"-?(0x)?[0-9a-f]+", word) else None
        found = self.values.get(word.lstrip("-~"))
        if found is None:
            return None
        return {"-": -found & WORD, "~": ~found & WORD}.get(word[0], found)

    def pair(self, word: str) -> int | None:
        """64 bits: of a register and the one behind it, or a constant."""
        if "UR" not in word or word == "URZ":
            return int(word.replace("URZ", "0"), 0) & (1 << 64) - 1
        low, high = (self.values.get(f"UR{int(word[2:]) + i}") for i in (0, 1))
        return None if low is None or high is None else low | high << 32

    def run(self, op: str, words: list[str]) -> None:
        """An instruction that is not guarded."""
        target, *words = words
        carried = words.pop(0) if words and words[0].startswith("UP") else ""
        values = [self.value(word) for word in words]
        result: int | None = None
        if op == "UIADD3.64":
            pairs = [self.pair(word) for word in words]
            total = None if None in pairs else sum(pairs)
            result = None if total is None else total & WORD
            self.values[f"UR{int(target[2:]) + 1}"] = None if total is None else total >> 32 & WORD
        elif op in ("UIADD3", "UIADD3.X"):
            parts = [*values[:3], self.carries.get(words[3]) if op == "UIADD3.X" else 0]
            total = None if None in parts else sum(parts)
            result = None if total is None else total & WORD
            self.carries[carried] = None if total is None else total >> 32
        elif op == "UMOV":
            result = values[0]
        elif op == "USHF.R.U32.HI" and None not in (values[1], values[2]):
            result = values[2] >> values[1]
        elif op == "USGXT.U32" and None not in values:
            result = values[0] & (1 << values[1]) - 1
        elif op == "ULEA" and None not in values[:3]:
            result = (values[0] << values[2]) + values[1] & WORD
        elif op == "S2UR":
            result = 0 if "CgaCtaId" in words[0] else None
        self.values[target] = result


def descriptors(cubin: Path) -> list[int]:
    """Those that are known of all products, in the order of the code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    registers, found = UniformRegisters(), []
    for line in re.sub(r"/\*.*?\*/", "", code).splitlines():
        instruction = re.match(r"\s*(@!?U?P\w+)?\s*([A-Z]\S+)\s*(.*?)\s*;", line)
        if instruction is None:
            continue
        guard, op, rest = instruction.groups()
        if op.startswith("HGMMA"):
            first = int(re.search(r"gdesc\[UR(\d+)\]", rest).group(1))
            of_a = [] if re.match(r"R\d+, R\d+,", rest) else [first]
            both = (registers.pair(f"UR{at}") for at in (*of_a, first + 2))
            found += [one for one in both if one is not None]
        elif re.match(r"UR\d+,", rest):
            words = [word.strip().replace(".reuse", "") for word in rest.split(",")]
            if guard:
                registers.values[words[0]] = None
            else:
                registers.run(op, words)
    return found


def is_whole(descriptor: int) -> bool:
    """Whether its groups of eight rows follow one another, as the compiler lays tiles out."""
    width = WIDTH.get(descriptor >> 62)
    return width is not None and (descriptor >> 32 & 0x3FFF) << 4 == 8 * width
