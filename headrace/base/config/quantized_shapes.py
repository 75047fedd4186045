"""The shape of a quantized weight, worked out from the tensors that stand for it, and the shapes
that these must have; for the rows of quantized_arrangements.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.base.config.quantization import Numbers

Shape = tuple[int, ...]


class Header(Protocol):
    """What a file's header says of a tensor."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class StoredMembers:
    """The members of one weight while its shape is worked out, by role."""

    names: Mapping[str, str]
    headers: Mapping[str, Header]
    read: Callable[[str], bytes]
    numbers: Numbers

    def shape(self, role: str) -> Shape:
        return self.headers[self.names[role]].shape

    def has(self, role: str) -> bool:
        return self.names[role] in self.headers

    def content(self, role: str) -> bytes:
        return self.read(self.names[role])


def groups_of(size: int, group: int) -> int:
    """Scales along a dimension of `size`."""
    return 1 if group == 0 else -(-size // group)


def packed_shape(stored: StoredMembers) -> Shape:
    outputs, words = stored.shape("values")
    return outputs, words * 32 // stored.numbers.bits


def words_shape(stored: StoredMembers) -> Shape:
    """Words of 32 bits along the inputs, of experts too."""
    *outer, words = stored.shape("values")
    inputs, size = words * 32 // stored.numbers.bits, (stored.numbers.group or (1, 0))[1]
    if size and inputs % size:
        raise ValueError(f"groups of {size} do not divide {inputs}")
    return (*outer, inputs)


def rows_by_group_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """A scale (and what is added) for each output and group of inputs, of experts too."""
    forms: tuple[Shape, ...] = ((*shape[:-1], groups_of(shape[-1], (numbers.group or (1, 0))[1])),)
    return {"scales": forms, "zeros": forms}


def packed_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, groups = shape[0], groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {
        "scales": ((outputs, groups), *_single(numbers)),
        "zeros": ((-(-outputs * numbers.bits // 32), groups),),
        "order": ((shape[1],),),
    }


def gptq_shape(stored: StoredMembers) -> Shape:
    words, outputs = stored.shape("values")
    return outputs, words * 32 // stored.numbers.bits


def awq_shape(stored: StoredMembers) -> Shape:
    inputs, words = stored.shape("values")
    return words * 8, inputs


def gemv_width(shape: Shape, numbers: Numbers) -> int:
    """Words of zero points of an output as AWQ's kernels for one token pad them."""
    size = (numbers.group or (1, 0))[1] or shape[1]
    words = -(-groups_of(shape[1], size) // 8)
    multiple = {32: 4, 64: 2}.get(size, 1)
    return -(-words // multiple) * multiple


def gemv_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    width = gemv_width(shape, numbers)
    return {"scales": ((shape[0], 8 * width),), "zeros": ((shape[0], width),)}


def gemv_fast_shape(stored: StoredMembers) -> Shape:
    fours, inputs = stored.shape("values")
    if inputs % 64:
        raise ValueError(f"runs of 64 inputs do not divide {inputs}")
    return fours * 4, inputs


def gemv_fast_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    forms = ((8 * gemv_width(shape, numbers), shape[0]),)
    return {"scales": forms, "zeros": forms}


def marlin_shape(stored: StoredMembers) -> Shape:
    tiles, words = stored.shape("values")
    return _strips(words * 2 // stored.numbers.bits, words), tiles * 16


def marlin_sparse_shape(stored: StoredMembers) -> Shape:
    """Of each 32 inputs 16 are kept."""
    tiles, words = stored.shape("values")
    return _strips(words * 2 // stored.numbers.bits, words), tiles * 32


def _strips(outputs: int, words: int) -> int:
    if outputs == 0 or outputs % 64:
        raise ValueError(f"{words} words of a row are no multiple of 64 outputs")
    return outputs


def marlin_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    groups = groups_of(inputs, (numbers.group or (1, 0))[1])
    return {"scales": ((groups, outputs),), "bitmask": ((inputs // 32, 2 * outputs),)}


def tinygemm_shape(stored: StoredMembers) -> Shape:
    eights, spans, threads, words = stored.shape("values")
    if threads != 32 or words not in (1, 2, 4):
        raise ValueError("its last two sizes must be 32 and 1, 2 or 4")
    return eights * 8, spans * 32 * words


def tinygemm_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    forms = ((groups_of(shape[1], (numbers.group or (1, 0))[1]), shape[0], 2),)
    return {"scales": forms, "zeros": forms}


def eetq_shape(stored: StoredMembers) -> Shape:
    inputs, outputs = stored.shape("values")
    if inputs % 64 or outputs % 64:
        raise ValueError("both sizes must be multiples of 64")
    return outputs, inputs


def turned_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """Of GPTQ and AWQ: a row for each group of inputs."""
    groups = groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {
        "scales": ((groups, shape[0]),),
        "zeros": ((groups, shape[0] * numbers.bits // 32),),
        "order": ((shape[1],),),
    }


def values_shape(stored: StoredMembers) -> Shape:
    return stored.shape("values")


def scaled_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """A scale of all, of each output, or of each block."""
    *experts, outputs, inputs = shape
    if numbers.group is None:
        forms: tuple[Shape, ...] = ((*experts, outputs, 1), (*experts, outputs))
        forms = (*forms, (), (1,), tuple(experts))
    else:
        sections = numbers.sections
        by_output = sections * groups_of(-(-outputs // sections), numbers.group[0])
        by_input = groups_of(inputs, numbers.group[1])
        forms = ((*experts, by_output, by_input), *_single(numbers))
        if by_input == 1:
            forms = (*forms, (*experts, by_output))
        if min(numbers.group) > 1:  # ModelOpt's, which leaves the blocks' own dimensions
            forms = (*forms, (*experts, by_output, 1, by_input, 1))
    one = ((), (1,), tuple(experts))
    members = {"scales": forms, "zeros": forms, "smooth": ((inputs,),)}
    return {**members, "inputs": one, "input_zeros": one}


def _single(numbers: Numbers) -> tuple[Shape, ...]:
    return ((), (1,)) if numbers.group == (0, 0) else ()


def nibbles_shape(stored: StoredMembers) -> Shape:
    *outer, half = stored.shape("values")
    return (*outer, half * 2)


def nibbles_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    assert numbers.group is not None, numbers
    groups = groups_of(shape[-1], numbers.group[1])
    scales: tuple[Shape, ...] = ((*shape[:-1], groups),)
    return {"scales": scales, "outer": ((), (1,)), "smooth": ((shape[-1],),)}


def pairs_shape(stored: StoredMembers) -> Shape:
    """Two outputs to a byte."""
    half, inputs = stored.shape("values")
    return half * 2, inputs


def sextets_shape(stored: StoredMembers) -> Shape:
    outputs, size = stored.shape("values")
    return outputs, size * 4 // 3


def by_group_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """A row of scales and zero points for each group of inputs."""
    groups = groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {"scales": ((groups, shape[0]),), "zeros": ((groups, shape[0]),)}


def stated_shape(stored: StoredMembers) -> Shape:
    """What a tensor `shape` of two int64 says."""
    content = stored.content("shape")
    if len(content) != 16:
        raise ValueError(f"its shape is {len(content)} bytes, not two int64")
    outputs, inputs = (int.from_bytes(content[i : i + 8], "little") for i in (0, 8))
    group = (stored.numbers.group or (1, 0))[1]
    along = outputs * inputs if stored.numbers.arrangement == "hqq-axis0" else inputs
    if group and along % group:
        raise ValueError(f"groups of {group} do not divide {along}")
    return outputs, inputs


def half_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    scales = scaled_members(shape, numbers)
    values = {"values": ((outputs, inputs // 2),), "bitmask": ((outputs, -(-inputs // 8)),)}
    return {**scales, **values}


def sparse_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    scales = scaled_members(shape, numbers)
    return {**scales, "bitmask": ((outputs, -(-inputs // 8)),), "offsets": ((outputs,),)}


def hqq_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """Rows of groups, the fields of a word far apart: the first of them hold the first rows."""
    size = (numbers.group or (1, 0))[1] or shape[1]
    groups = shape[0] * shape[1] // size
    along, across = (groups, size) if numbers.arrangement == "hqq" else (size, groups)
    fields = 10 if numbers.bits == 3 else 8 // numbers.bits
    scales = (groups, 1) if numbers.arrangement == "hqq" else (1, groups)
    return {
        "values": ((-(-along // fields), across),),
        "scales": (scales,),
        "zeros": (scales,),
    }


def gpt_oss_shape(stored: StoredMembers) -> Shape:
    experts, outputs, groups, half = stored.shape("values")
    return experts, groups * half * 2, outputs


def gpt_oss_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    experts, inputs, outputs = shape
    return {"scales": ((experts, outputs, inputs // 32),)}


def bnb_shape(stored: StoredMembers) -> Shape:
    state: dict[str, list[int]] = json.loads(stored.content("nf4" if stored.has("nf4") else "fp4"))
    return tuple(state["shape"])
