"""How the weights of each format lie in a checkpoint: the tensors that stand for one by name and
shape, as rows of `ARRANGEMENTS`.

A row names the tensors after the weight ("model.layers.0.mlp.up_proj.weight") and its module (the
same without ".weight").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.base.config.quantization import Numbers

Shape = tuple[int, ...]
FP8 = ("F8_E4M3",)


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


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a weight is stored. `roles`: role -> the tensor's name, with {weight} or {module};
    "values" is what it is recognised by, if it has one of `dtypes`. `optional` roles may lack.
    `shape` works out the weight's shape; `expected` the shapes of its members."""

    roles: Mapping[str, str]
    dtypes: tuple[str, ...]
    shape: Callable[[StoredMembers], Shape]
    optional: tuple[str, ...] = ()
    expected: Callable[[Shape, Numbers], Mapping[str, tuple[Shape, ...]]] = lambda shape, numbers: {}

    def weight_of(self, tensor: str) -> str | None:
        """The weight whose values a tensor of this name holds."""
        template = self.roles["values"]
        leaf = template.removeprefix("{weight}").removeprefix("{module}")
        if not tensor.endswith(leaf):
            return None
        stem = tensor.removesuffix(leaf)
        return f"{stem}.weight" if template.startswith("{module}") else stem

    def names(self, weight: str) -> dict[str, str]:
        """Role -> tensor, of this weight."""
        module = weight.removesuffix(".weight")
        return {
            role: template.format(weight=weight, module=module)
            for role, template in self.roles.items()
        }


def groups_of(size: int, group: int) -> int:
    """Scales along a dimension of `size`."""
    return 1 if group == 0 else -(-size // group)


def _packed_shape(stored: StoredMembers) -> Shape:
    outputs, words = stored.shape("values")
    return outputs, words * 32 // stored.numbers.bits


def _packed_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, groups = shape[0], groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {
        "scales": ((outputs, groups), *_single(numbers)),
        "zeros": ((-(-outputs * numbers.bits // 32), groups),),
        "order": ((shape[1],),),
    }


def _gptq_shape(stored: StoredMembers) -> Shape:
    words, outputs = stored.shape("values")
    return outputs, words * 32 // stored.numbers.bits


def _awq_shape(stored: StoredMembers) -> Shape:
    inputs, words = stored.shape("values")
    return words * 8, inputs


def _turned_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """Of GPTQ and AWQ: a row for each group of inputs."""
    groups = groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {
        "scales": ((groups, shape[0]),),
        "zeros": ((groups, shape[0] * numbers.bits // 32),),
        "order": ((shape[1],),),
    }


def _values_shape(stored: StoredMembers) -> Shape:
    return stored.shape("values")


def _scaled_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """A scale of all, of each output, or of each block."""
    *experts, outputs, inputs = shape
    if numbers.group is None:
        forms: tuple[Shape, ...] = ((*experts, outputs, 1), (*experts, outputs))
        forms = (*forms, (), (1,), tuple(experts))
    else:
        by_output, by_input = (
            groups_of(n, g) for n, g in zip((outputs, inputs), numbers.group, strict=True)
        )
        forms = ((*experts, by_output, by_input), *_single(numbers))
        if by_input == 1:
            forms = (*forms, (*experts, by_output))
    return {"scales": forms, "zeros": forms}


def _single(numbers: Numbers) -> tuple[Shape, ...]:
    return ((), (1,)) if numbers.group == (0, 0) else ()


def _nibbles_shape(stored: StoredMembers) -> Shape:
    *outer, half = stored.shape("values")
    return (*outer, half * 2)


def _nibbles_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    assert numbers.group is not None, numbers
    groups = groups_of(shape[-1], numbers.group[1])
    return {"scales": ((*shape[:-1], groups),), "outer": ((), (1,))}


def _sextets_shape(stored: StoredMembers) -> Shape:
    outputs, size = stored.shape("values")
    return outputs, size * 4 // 3


def _by_group_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    """A row of scales and zero points for each group of inputs."""
    groups = groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {"scales": ((groups, shape[0]),), "zeros": ((groups, shape[0]),)}


def _stated_shape(stored: StoredMembers) -> Shape:
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


def _half_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    scales = _scaled_members(shape, numbers)
    values = {"values": ((outputs, inputs // 2),), "bitmask": ((outputs, -(-inputs // 8)),)}
    return {**scales, **values}


def _sparse_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    scales = _scaled_members(shape, numbers)
    return {**scales, "bitmask": ((outputs, -(-inputs // 8)),), "offsets": ((outputs,),)}


def _hqq_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
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


def _gpt_oss_shape(stored: StoredMembers) -> Shape:
    experts, outputs, groups, half = stored.shape("values")
    return experts, groups * half * 2, outputs


def _gpt_oss_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    experts, inputs, outputs = shape
    return {"scales": ((experts, outputs, inputs // 32),)}


def _bnb_shape(stored: StoredMembers) -> Shape:
    state: dict[str, list[int]] = json.loads(stored.content("nf4" if stored.has("nf4") else "fp4"))
    return tuple(state["shape"])


_SPARSE = {
    "values": "{module}.compressed",
    "bitmask": "{module}.bitmask",
    "shape": "{module}.shape",
    "scales": "{weight}_scale",
    "zeros": "{weight}_zero_point",
}
_SPARSE_DTYPES = ("BF16", "F16", "F32", "I8", "F8_E4M3")
_TORCHAO = {
    "values": "{module}._weight_qdata",
    "scales": "{module}._weight_scale",
    "zeros": "{module}._weight_zero_point",
}
_HQQ = (
    "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""What HQQ writes beside a weight; only its shape is needed."""
_BNB = "{weight}.quant_state.bitsandbytes__"
ARRANGEMENTS: Mapping[str, Arrangement] = {
    "gptq": Arrangement(
        roles={
            "values": "{module}.qweight",
            "scales": "{module}.scales",
            "zeros": "{module}.qzeros",
            "order": "{module}.g_idx",
        },
        dtypes=("I32",),
        optional=("order",),
        shape=_gptq_shape,
        expected=_turned_members,
    ),
    "awq": Arrangement(
        roles={
            "values": "{module}.qweight",
            "scales": "{module}.scales",
            "zeros": "{module}.qzeros",
        },
        dtypes=("I32",),
        shape=_awq_shape,
        expected=_turned_members,
    ),
    "packed": Arrangement(
        roles={
            "values": "{weight}_packed",
            "scales": "{weight}_scale",
            "zeros": "{weight}_zero_point",
            "order": "{weight}_g_idx",
            "shape": "{weight}_shape",
        },
        dtypes=("I32",),
        optional=("zeros", "order", "shape"),
        shape=_packed_shape,
        expected=_packed_members,
    ),
    "scaled": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale", "zeros": "{weight}_zero_point"},
        dtypes=("I8", "F8_E4M3"),
        optional=("zeros",),
        shape=_values_shape,
        expected=_scaled_members,
    ),
    "fp8-blocks": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale_inv"},
        dtypes=FP8,
        shape=_values_shape,
        expected=_scaled_members,
    ),
    "nvfp4-packed": Arrangement(
        roles={
            "values": "{weight}_packed",
            "scales": "{weight}_scale",
            "outer": "{weight}_global_scale",
        },
        dtypes=("U8",),
        shape=_nibbles_shape,
        expected=_nibbles_members,
    ),
    "mxfp4-packed": Arrangement(
        roles={"values": "{weight}_packed", "scales": "{weight}_scale"},
        dtypes=("U8",),
        shape=_nibbles_shape,
        expected=_nibbles_members,
    ),
    "mxfp4-quark": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale"},
        dtypes=("U8",),
        shape=_nibbles_shape,
        expected=_nibbles_members,
    ),
    "nvfp4": Arrangement(
        roles={"values": "{weight}", "scales": "{weight}_scale", "outer": "{weight}_scale_2"},
        dtypes=("U8",),
        shape=_nibbles_shape,
        expected=_nibbles_members,
    ),
    "mxfp4-blocks": Arrangement(
        roles={"values": "{weight}_blocks", "scales": "{weight}_scales"},
        dtypes=("U8",),
        shape=_gpt_oss_shape,
        expected=_gpt_oss_members,
    ),
    "mxfp6-packed": Arrangement(
        roles={"values": "{weight}_packed", "scales": "{weight}_scale"},
        dtypes=("U8",),
        shape=_sextets_shape,
        expected=_nibbles_members,
    ),
    "sparse-24": Arrangement(
        roles=_SPARSE,
        dtypes=_SPARSE_DTYPES,
        optional=("scales", "zeros"),
        shape=_stated_shape,
        expected=_half_members,
    ),
    "sparse": Arrangement(
        roles={**_SPARSE, "offsets": "{module}.row_offsets"},
        dtypes=_SPARSE_DTYPES,
        optional=("scales", "zeros"),
        shape=_stated_shape,
        expected=_sparse_members,
    ),
    "torchao-int8": Arrangement(
        roles=_TORCHAO,
        dtypes=("I8",),
        optional=("zeros",),
        shape=_values_shape,
        expected=_scaled_members,
    ),
    "torchao-float8": Arrangement(
        roles={role: name for role, name in _TORCHAO.items() if role != "zeros"},
        dtypes=FP8,
        shape=_values_shape,
        expected=_scaled_members,
    ),
    "torchao-int4": Arrangement(
        roles=_TORCHAO, dtypes=("I8",), shape=_nibbles_shape, expected=_by_group_members
    ),
    **{
        kind: Arrangement(
            roles={"values": "{module}.W_q", "scales": "{module}.scale", "zeros": "{module}.zero"}
            | {key: f"{{module}}.{key}" for key in _HQQ},
            dtypes=("U8", "I32"),
            optional=tuple(key for key in _HQQ if key != "shape"),
            shape=_stated_shape,
            expected=_hqq_members,
        )
        for kind in ("hqq", "hqq-axis0")
    },
    "bnb-4bit": Arrangement(
        roles={
            "values": "{weight}",
            "scales": "{weight}.absmax",
            "levels": "{weight}.quant_map",
            "nf4": _BNB + "nf4",
            "fp4": _BNB + "fp4",
            "nested_scales": "{weight}.nested_absmax",
            "nested_levels": "{weight}.nested_quant_map",
        },
        dtypes=("U8",),
        optional=("nf4", "fp4", "nested_scales", "nested_levels"),
        shape=_bnb_shape,
    ),
    **{
        kind: Arrangement(
            roles={"values": "{weight}", "scales": "{weight}_scale"},
            dtypes=("U8",),
            shape=lambda stored: (4 * stored.shape("values")[0], *stored.shape("values")[1:]),
            expected=lambda shape, numbers: {"scales": ((1,), ())},
        )
        for kind in ("ternary", "ternary-inverse")
    },
    "bnb-int8": Arrangement(
        roles={"values": "{weight}", "scales": "{module}.SCB", "format": "{module}.weight_format"},
        dtypes=("I8",),
        optional=("format",),
        shape=_values_shape,
        expected=lambda shape, numbers: {"scales": ((shape[0],),)},
    ),
}
