"""Which tensors of a checkpoint stand for a quantized weight, and the shape of that weight, from
the headers alone.

A row of `ARRANGEMENTS` names the tensors after the weight ("model.layers.0.mlp.up_proj.weight")
and its module (the same without ".weight"). What no weight claims stays in the list of tensors, and
is refused later as unknown to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.base.config.quantization import Numbers, StoredQuantization
from headrace.base.errors import CheckpointError

Shape = tuple[int, ...]
FP8 = ("F8_E4M3",)
POWERS = ("U8", "F8_E8M0")


class Header(Protocol):
    """What a file's header says of a tensor."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> str: ...


Bytes = Callable[[str], bytes]
"""A small tensor's content."""


class QuantizedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A weight that several tensors stand for. `members`: role (as in `ARRANGEMENTS`) -> tensor;
    `shape` is the weight's; `floating`: the values are e4m3."""

    name: str
    shape: tuple[int, ...]
    numbers: Numbers
    members: dict[str, str]
    floating: bool = False

    @property
    def kind(self) -> str:
        """What it is called in messages."""
        return f"{self.numbers.bits}-bit {self.numbers.arrangement}"


@dataclass(frozen=True)
class QuantizedTensors:
    """The quantized weights by name, and the tensors that were claimed or are not needed:
    `activation_scales` are of inputs and of the KV cache, which are quantized as they come."""

    weights: Mapping[str, QuantizedTensor]
    claimed: frozenset[str]
    activation_scales: frozenset[str]


@dataclass(frozen=True)
class _Stored:
    """The members of one weight while its shape is worked out, by role."""

    names: Mapping[str, str]
    headers: Mapping[str, Header]
    read: Bytes
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
    shape: Callable[[_Stored], Shape]
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


def _packed_shape(stored: _Stored) -> Shape:
    outputs, words = stored.shape("values")
    return outputs, words * 32 // stored.numbers.bits


def _packed_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    outputs, groups = shape[0], groups_of(shape[1], (numbers.group or (1, 0))[1])
    return {
        "scales": ((outputs, groups), *_single(numbers)),
        "zeros": ((-(-outputs * numbers.bits // 32), groups),),
        "order": ((shape[1],),),
    }


def _gptq_shape(stored: _Stored) -> Shape:
    words, outputs = stored.shape("values")
    return outputs, words * 32 // stored.numbers.bits


def _awq_shape(stored: _Stored) -> Shape:
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


def _values_shape(stored: _Stored) -> Shape:
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


def _nibbles_shape(stored: _Stored) -> Shape:
    *outer, half = stored.shape("values")
    return (*outer, half * 2)


def _nibbles_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    assert numbers.group is not None, numbers
    groups = groups_of(shape[-1], numbers.group[1])
    return {"scales": ((*shape[:-1], groups),), "outer": ((), (1,))}


def _gpt_oss_shape(stored: _Stored) -> Shape:
    experts, outputs, groups, half = stored.shape("values")
    return experts, groups * half * 2, outputs


def _gpt_oss_members(shape: Shape, numbers: Numbers) -> Mapping[str, tuple[Shape, ...]]:
    experts, inputs, outputs = shape
    return {"scales": ((experts, outputs, inputs // 32),)}


def _bnb_shape(stored: _Stored) -> Shape:
    state: dict[str, list[int]] = json.loads(stored.content("nf4" if stored.has("nf4") else "fp4"))
    return tuple(state["shape"])


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
    "bnb-int8": Arrangement(
        roles={"values": "{weight}", "scales": "{module}.SCB", "format": "{module}.weight_format"},
        dtypes=("I8",),
        optional=("format",),
        shape=_values_shape,
        expected=lambda shape, numbers: {"scales": ((shape[0],),)},
    ),
}

_ACTIVATION_SCALES = re.compile(
    r".*\.(input_scale|input_zero_point|input_global_scale|input_scale_ub|input_activation_scale"
    r"|output_scale|[qkv]_scale|kv_scale|[qkv]_zero_point|prob_output_scale|weight_scale_ub)"
)
"""Names of scales of inputs and of the KV cache, beside any module."""


def find_quantized(
    quantization: StoredQuantization, headers: Mapping[str, Header], content: Bytes, where: str
) -> QuantizedTensors:
    """The quantized weights among a checkpoint's tensors. A member that is missing or has another
    shape, or a weight that is quantized although the config says it is plain: CheckpointError."""
    weights: dict[str, QuantizedTensor] = {}
    claimed: set[str] = set()
    for weight, numbers in _weights(quantization, headers, where):
        tensor = _tensor(weight, numbers, headers, content, where)
        weights[weight] = tensor
        claimed |= set(tensor.members.values())
    scales = frozenset(
        name for name in headers.keys() - claimed if _ACTIVATION_SCALES.fullmatch(name)
    )
    return QuantizedTensors(weights, frozenset(claimed), scales)


def _weights(
    quantization: StoredQuantization, headers: Mapping[str, Header], where: str
) -> Iterator[tuple[str, Numbers]]:
    kinds = {rule.numbers.arrangement for rule in quantization.rules if rule.numbers is not None}
    for kind in sorted(kinds):
        arrangement = ARRANGEMENTS[kind]
        for name, header in headers.items():
            weight = arrangement.weight_of(name) if header.dtype in arrangement.dtypes else None
            if weight is None or _is_scale(weight, arrangement, headers):
                continue
            numbers = quantization.of(weight.removesuffix(".weight"))
            if numbers is None:
                raise CheckpointError(
                    f"{where}: {name} is quantized ({header.dtype}), but "
                    f"quantization_config says that its module is plain"
                )
            if numbers.arrangement == kind:
                yield weight, numbers


def _is_scale(weight: str, arrangement: Arrangement, headers: Mapping[str, Header]) -> bool:
    """Whether a tensor that could hold values (scales of bytes can) belongs to another one."""
    endings = [
        template.removeprefix("{weight}")
        for role, template in arrangement.roles.items()
        if role != "values" and template.startswith("{weight}")
    ]
    return any(weight.endswith(e) and weight.removesuffix(e) in headers for e in endings)


def _tensor(
    weight: str, numbers: Numbers, headers: Mapping[str, Header], content: Bytes, where: str
) -> QuantizedTensor:
    arrangement = ARRANGEMENTS[numbers.arrangement]
    names = arrangement.names(weight)
    needed = {name for role, name in names.items() if role not in arrangement.optional}
    missing = sorted(needed - headers.keys())
    if missing:
        raise CheckpointError(
            f"{where}: {names['values']} is quantized, but {', '.join(missing)} is missing"
        )
    stored = _Stored(names, headers, content, numbers)
    try:
        shape = arrangement.shape(stored)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{where}: {names['values']} has the shape {list(stored.shape('values'))}, which is "
            f"none of {numbers.arrangement} ({error})"
        ) from error
    members = {role: name for role, name in names.items() if name in headers}
    floating = headers[members["values"]].dtype in FP8
    tensor = QuantizedTensor(
        name=weight, shape=shape, numbers=numbers, members=members, floating=floating
    )
    for role, forms in arrangement.expected(shape, numbers).items():
        if role in members and stored.shape(role) not in forms:
            wanted = " or ".join(str(list(form)) for form in dict.fromkeys(forms))
            raise CheckpointError(
                f"{where}: {members[role]} has the shape {list(stored.shape(role))}, not {wanted}, "
                f"beside a weight of {list(shape)} in {tensor.kind}"
            )
    return tensor
