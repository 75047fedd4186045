"""Which tensors of a checkpoint stand for a quantized weight, and the shape of that weight, from
the headers alone.

What no weight claims stays in the list of tensors, and is refused later as unknown to the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from headrace.base.config.arrangement import Arrangement
from headrace.base.config.quantization import Numbers, StoredQuantization
from headrace.base.config.quantized_arrangements import FP8, arrangement_of
from headrace.base.config.quantized_shapes import Header, StoredMembers
from headrace.base.errors import CheckpointError

Bytes = Callable[[str], bytes]
"""A small tensor's content."""


class QuantizedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A weight that several tensors stand for. `members`: role (as in `ARRANGEMENTS`) -> tensor;
    `shape` is the weight's; `floating`: the values are e4m3. Of one that lies in a merged weight:
    the row that is its first there, and the outputs of all that do."""

    name: str
    shape: tuple[int, ...]
    numbers: Numbers
    members: dict[str, str]
    floating: bool = False
    first_row: int = 0
    merged_rows: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """What it is called in messages."""
        return f"{self.numbers.bits}-bit {self.numbers.arrangement}"

    @property
    def kept_bits(self) -> int:
        """Bits of a number where kernels read it: there are kernels for 4 and for 8. Ternary ones
        meet int8 activations."""
        ternary = self.numbers.arrangement.startswith("ternary")
        return 4 if self.numbers.bits <= 4 and not ternary else 8

    @property
    def stays_quantized(self) -> bool:
        """Whether there are kernels that read it as it is stored."""
        numbers = self.numbers
        if "smooth" in self.members:
            return False
        known = numbers.arrangement in _READ_AS_STORED and numbers.bits <= 8
        return known and (self.kept_bits == 4 or not numbers.ordered)


_READ_AS_STORED = {
    *("gptq", "awq", "packed", "scaled", "fp8-blocks"),
    *("mxfp4-packed", "mxfp4-quark", "mxfp4-blocks", "nvfp4", "nvfp4-packed", "modelopt-int4"),
    *("awq-gemv", "awq-gemv-fast", "awq-marlin", "gptq-marlin", "gptq-marlin-24", "marlin-24"),
    *("eetq", "metal", "torchao-int8", "torchao-float8", "torchao-int4", "torchao-tiles"),
    *("mlx", "mlx-mxfp4", "mlx-nvfp4", "quark-uint4", "quark-int4"),
    *(
        "bitblas",
        "int8-blocks",
        "signed-pairs",
        "quanto",
        "quanto-packed",
        "row-integers",
        "fouroversix-nvfp4",
        "fouroversix-mxfp4",
    ),
}
"""Arrangements whose numbers some device's kernels read; all else becomes floats."""


@dataclass(frozen=True)
class QuantizedTensors:
    """The quantized weights by name, and the tensors that were claimed or are not needed:
    `activation_scales` are of inputs and of the KV cache, which are quantized as they come."""

    weights: Mapping[str, QuantizedTensor]
    claimed: frozenset[str]
    activation_scales: frozenset[str]


_ACTIVATION_SCALES = re.compile(
    r".*\.(input_scale|activation_scale|input_zero_point|input_global_scale|input_scale_ub|input_activation_scale"
    r"|output_scale|[qkv]_scale|kv_scale|[kv]_cache_scale|[qkv]_zero_point|prob_output_scale|weight_scale_ub)"
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
        weights |= {one.name: one for one in _apart(tensor, quantization, where)}
        claimed |= set(tensor.members.values())
    scales = frozenset(
        name for name in headers.keys() - claimed if _ACTIVATION_SCALES.fullmatch(name)
    )
    return QuantizedTensors(weights, frozenset(claimed), scales)


def _apart(
    tensor: QuantizedTensor, quantization: StoredQuantization, where: str
) -> Iterator[QuantizedTensor]:
    """The weight, or those that it holds side by side."""
    stem, _, last = tensor.name.removesuffix(".weight").rpartition(".")
    if last not in quantization.merged:
        yield tensor
        return
    parts = quantization.merged[last]
    sizes = tuple(rows for _, rows in parts)
    if sum(sizes) != tensor.shape[0]:
        raise CheckpointError(
            f"{where}: {tensor.name} has {tensor.shape[0]} outputs; "
            f"{', '.join(f'{name} has {rows}' for name, rows in parts)}"
        )
    for place, (name, rows) in enumerate(parts):
        yield msgspec.structs.replace(
            tensor,
            name=f"{stem}.{name}.weight",
            shape=(rows, *tensor.shape[1:]),
            first_row=sum(sizes[:place]),
            merged_rows=sizes,
        )


_PLAIN = Numbers(arrangement="", bits=16, group=(0, 0))
"""Of sparse weights that are not quantized."""


def _weights(
    quantization: StoredQuantization, headers: Mapping[str, Header], where: str
) -> Iterator[tuple[str, Numbers]]:
    kinds = {rule.numbers.arrangement for rule in quantization.rules if rule.numbers is not None}
    sparse: set[str] = set()  # their values, which could be those of a plainer arrangement too
    for kind in sorted(
        kinds | ({quantization.sparse} - {""}), key=lambda k: k != quantization.sparse
    ):
        arrangement = arrangement_of(kind)
        for name, header in headers.items():
            weight = arrangement.weight_of(name) if header.dtype in arrangement.dtypes else None
            if weight is None or name in sparse or _is_scale(weight, arrangement, headers):
                continue
            if arrangement.marked and arrangement.names(weight)[arrangement.marked] not in headers:
                continue
            numbers = quantization.of(weight.removesuffix(".weight"))
            if kind == quantization.sparse:
                sparse.add(name)
                numbers = msgspec.structs.replace(numbers or _PLAIN, arrangement=kind)
            if numbers is None:
                raise CheckpointError(
                    f"{where}: {name} is quantized ({header.dtype}), but "
                    f"quantization_config says that its module is plain"
                )
            if numbers.arrangement == kind:
                yield weight, numbers


def _is_scale(weight: str, arrangement: Arrangement, headers: Mapping[str, Header]) -> bool:
    """Whether a tensor that could hold values (scales and zero points of bytes can) belongs to
    another one."""
    if _ACTIVATION_SCALES.fullmatch(weight):
        return True
    endings = [
        template.removeprefix("{weight}")
        for role, template in arrangement.roles.items()
        if role != "values" and template.startswith("{weight}")
    ]
    return any(weight.endswith(e) and weight.removesuffix(e) in headers for e in endings)


def _tensor(
    weight: str, numbers: Numbers, headers: Mapping[str, Header], content: Bytes, where: str
) -> QuantizedTensor:
    arrangement = arrangement_of(numbers.arrangement)
    names = arrangement.names(weight, headers)
    needed = {name for role, name in names.items() if role not in arrangement.optional}
    missing = sorted(needed - headers.keys())
    if missing:
        raise CheckpointError(
            f"{where}: {names['values']} is quantized, but {', '.join(missing)} is missing"
        )
    stored = StoredMembers(names, headers, content, numbers)
    try:
        shape = arrangement.shape(stored)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{where}: {names['values']} has the shape {list(stored.shape('values'))}, which is "
            f"none of {numbers.arrangement} ({error})"
        ) from error
    if arrangement.group is not None:
        size = arrangement.group(stored)
        numbers = msgspec.structs.replace(numbers, group=(1, 0 if size == shape[-1] else size))
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
