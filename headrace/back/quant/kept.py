"""Weights of quantized safetensors whose numbers a packed layout holds as they are: integers or
e4m3 with the groups that there are kernels for. Only their order in memory changes, and float16
scales of groups become bfloat16.

A weight waits unpacked, a byte a value, until its last piece is there; loaders fill few at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from threading import Lock

import torch

from headrace.back.kernels.linear_blocks import layout as blocks
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_quant.layout import PackedWeight, with_fixed, write_panels
from headrace.back.parallel.bundle import CutGroup, Dim
from headrace.back.parallel.param import Copy, Param, copies, cut_error
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.inputs import InputRange
from headrace.back.quant.online import chunks, empty_weight, size_of
from headrace.back.quant.scheme import ONLINE_SCHEMES, SCHEMES, Quantized, Scheme, halved
from headrace.base.config.quantization import Numbers
from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError

KeptSchemes = Mapping[str, str]
"""Checkpoint weight -> name of the scheme that it is stored in."""

BLOCKS = "fp8-g128"
"""e4m3 with a scale for each output and 128 inputs, or for blocks of 128 outputs."""
MICROSCALED = "fp8-g32"
"""MXFP8: e4m3 with a power of two for each output and 32 inputs."""
WHOLE_INT4 = {False: "int4-whole", True: "int4-asym-whole"}
"""4-bit integers with a scale (True: and a minimum) for each output: GPUs only (gpu_int4.py)."""
NVFP4 = "nvfp4"
"""e2m1 numbers with a scale for 16 inputs, itself an e4m3 number times one for all."""
INT8_ASYMMETRIC = {
    name: Scheme(name, 8, group, asymmetric=True)
    for name, group in (("int8-asym", 32), ("int8-asym-g64", 64), ("int8-asym-g128", 128))
}
"""8-bit integers with a zero point, or a float that is added, for so many inputs: CPUs only."""
VECTORS = {name: Scheme(name, 4, layout.part) for name, layout in blocks.VECTOR_LAYOUTS.items()}
"""Whole numbers of GGUF's IQ types, by their levels: CPUs only."""
PANEL_SCHEMES = {
    **SCHEMES,
    **INT8_ASYMMETRIC,
    **VECTORS,
    BLOCKS: ONLINE_SCHEMES["fp8-block"],
    MICROSCALED: ONLINE_SCHEMES["mxfp8"],
    NVFP4: ONLINE_SCHEMES["nvfp4"],
}
"""What CPUs read as it is stored."""
LEVELLED = {f"{kind}-g{size}": (kind, size) for kind in ("nf4", "fp4") for size in (64, 128)}
"""Scheme -> the levels of its numbers, and the inputs that share a scale (bitsandbytes): GPUs only
(gpu_int4.py)."""
ORDERED = "+order-"
"""Behind the name of a scheme whose inputs belong to groups by an index (act-order), before a mark
of that index: weights of one mark lie side by side. GPUs only (gpu_int4.py)."""
INT8_ROWS = "+int8-rows"
"""Behind the name of a scheme of integers whose checkpoint asks for int8 activations. GPUs only:
CPUs multiply integers by int8 whatever is asked."""
STORED_SCALE = "+stored-scale"
"""Behind all that, where the checkpoint holds a scale of the inputs. On CPUs of int8 alone: they
multiply e4m3 numbers by inputs as they are."""
_KEPT = (
    "gptq", "awq", "packed", "scaled", "sparse-24", "sparse", "torchao-int8", "torchao-float8",
    "torchao-int4", "hqq", "modelopt-int4", "mlx", "quark-uint4", "quark-int4", "ternary", "ternary-inverse",
    "awq-gemv", "awq-gemv-fast", "awq-marlin", "gptq-marlin", "gptq-marlin-24", "marlin-24", "eetq",
    "torchao-tiles", "metal", "quanto", "quanto-packed", "row-integers", "bitblas",
    "signed-pairs",
)  # fmt: skip
_MXFP4 = ("mxfp4-packed", "mxfp4-quark", "mxfp4-blocks", "mlx-mxfp4", "fouroversix-mxfp4")
_NVFP4 = ("nvfp4", "nvfp4-packed", "mlx-nvfp4", "fouroversix-nvfp4")
_WITHOUT_ZEROS = ("scaled", "sparse-24", "sparse")


BITSANDBYTES = ("bnb-4bit", "bnb-4bit-floats")


def levelled_scheme(tensor: QuantizedTensor, num_scales: int) -> str | None:
    """The scheme of bitsandbytes' 4-bit numbers, of which as many share a scale as there are; None:
    runs that share one begin within a row, or have another length."""
    if tensor.numbers.arrangement not in BITSANDBYTES or len(tensor.shape) != 2 or num_scales < 1:
        return None
    outputs, inputs = tensor.shape
    size = outputs * inputs // num_scales
    name = f"{'nf4' if 'nf4' in tensor.members else 'fp4'}-g{size}"
    whole = inputs % max(1, size) == 0 and num_scales * size == outputs * inputs
    return name if whole and name in LEVELLED else None


def kept_scheme(
    tensor: QuantizedTensor, order: Callable[[], torch.Tensor] | None = None
) -> str | None:
    """The scheme (scheme.py) that holds the same numbers; None: there is none. It may be of more
    bits: 4 hold 2 and 3. Of inputs that
    belong to groups by an index, which `order` reads, it is told by a mark of that index."""
    name = _plain_scheme(tensor)
    if name is None or not tensor.numbers.ordered:
        return name
    scheme = SCHEMES.get(name)
    if order is None or "order" not in tensor.members:
        return None
    if scheme is None or scheme.group is None:
        return None
    return _ordered(scheme, order().long())


def _ordered(scheme: Scheme, group_I: torch.Tensor) -> str | None:
    """None: groups are not of one size, or the kernels that know an order know no such numbers."""
    assert scheme.group is not None
    if torch.equal(group_I, torch.arange(len(group_I)) // scheme.group):
        return scheme.name
    counts = group_I.clamp(0, len(group_I)).bincount()
    if scheme.bits != 4 or scheme.floating or not bool((counts == scheme.group).all()):
        return None
    mark = hashlib.blake2b(group_I.numpy().tobytes(), digest_size=8).hexdigest()
    return f"{scheme.name}{ORDERED}{mark}"


def _plain_scheme(tensor: QuantizedTensor) -> str | None:
    numbers = tensor.numbers
    if "smooth" in tensor.members:
        return None
    if (in_groups := _in_groups(tensor)) is not None:
        return in_groups
    if numbers.arrangement in _MXFP4:
        return "mxfp4"
    if numbers.arrangement in _NVFP4:
        return NVFP4
    # MLX has experts in one tensor: a rectangle of it is one expert's.
    dims = len(tensor.shape) - (numbers.arrangement == "mlx")
    if numbers.arrangement not in _KEPT or dims > 2 or len(tensor.shape) < 2:
        return None
    if numbers.arrangement in _WITHOUT_ZEROS and "zeros" in tensor.members:
        return None
    if numbers.bits > 8:
        return None
    rows, group = numbers.group or (1, 0)
    whole = group == 0 and (rows <= 1)
    floating = tensor.floating
    asymmetric = "zeros" in tensor.members and not numbers.symmetric
    wanted = (tensor.kept_bits, None if whole else group, asymmetric, floating)
    for scheme in (*SCHEMES.values(), *INT8_ASYMMETRIC.values()):
        if (scheme.bits, scheme.group, scheme.asymmetric, scheme.floating) == wanted:
            return scheme.name if rows <= 1 else None
    return WHOLE_INT4[asymmetric] if whole and tensor.kept_bits == 4 and not floating else None


def _in_groups(tensor: QuantizedTensor) -> str | None:
    if tensor.numbers.arrangement == "int8-blocks":
        return "int8-g128" if tensor.numbers.group == (128, 128) else None
    plain = len(tensor.shape) == 2 and "zeros" not in tensor.members
    e4m3 = tensor.floating and tensor.numbers.arrangement in ("scaled", "fp8-blocks")
    if not plain or not e4m3 or tensor.numbers.group is None:
        return None
    return _FP8_GROUPS.get(tensor.numbers.group)


_FP8_GROUPS = {(1, 128): BLOCKS, (128, 128): BLOCKS, (1, 32): MICROSCALED}


def with_int8_rows(name: str) -> str:
    """The name of a scheme with int8 activations, where GPUs have kernels for both."""
    scheme = SCHEMES.get(name)
    if name == WHOLE_INT4[False]:
        return name + INT8_ROWS
    plain = scheme is not None and not scheme.floating and not scheme.asymmetric
    return name + INT8_ROWS if plain else name


def common_name(names: set[str]) -> str | None:
    """The name of a scheme that all parts of a weight have; a scale of inputs for some of them
    alone is no scale of the whole. None: there is none."""
    if len(names) > 1:
        names = {name.removesuffix(STORED_SCALE) for name in names}
    return names.pop() if len(names) == 1 else None


def bare(name: str) -> str:
    """A scheme's name without what the checkpoint asks for inputs."""
    return name.removesuffix(STORED_SCALE).removesuffix(INT8_ROWS)


def _stored_name(param: Param, kept: KeptSchemes) -> str | None:
    """The name of the scheme that all pieces are stored in; None: there is none."""
    return common_name({kept.get(piece.name, "") for piece in param.pieces})


def inputs_scaled(param: Param, kept: KeptSchemes) -> bool:
    """Whether the checkpoint holds a scale of the inputs of all pieces."""
    return (_stored_name(param, kept) or "").endswith(STORED_SCALE)


def scheme_of(param: Param, kept: KeptSchemes) -> Scheme | None:
    """The scheme of a matrix all of whose pieces are stored in it; None where a split over ranks
    cuts a block of e4m3 or e2m1 numbers."""
    stored = _stored_name(param, kept)
    scaled = any(piece.scale != 1.0 for piece in param.pieces)
    if len(param.shape) != 2 or stored is None or scaled:
        return None
    name = bare(stored)
    scheme = PANEL_SCHEMES.get(name)
    return None if scheme is None or (name not in SCHEMES and _is_cut(param, scheme)) else scheme


def _is_cut(param: Param, scheme: Scheme) -> bool:
    assert param.tensor is not None, param
    try:
        for copy in copies(param):
            _group_columns(copy, scheme, param.tensor.shape[1])
    except CutGroup:
        return True
    return False


def _group_columns(copy: Copy, scheme: Scheme, inputs: int) -> tuple[slice, slice]:
    """The groups of a copy, in the checkpoint and in a weight of so many inputs; CutGroup if it
    cuts one."""
    dim = Dim(1, per=scheme.group or 0)
    here = copy.target[1]
    assert isinstance(here, slice)
    return dim.cut(copy.source, copy.shape), dim.cut((slice(0), here), (0, inputs))


class KeptWeight:
    """A weight [outputs, inputs] filled with `Groups`. `take` gives it to its layer. `fixed`: the
    checkpoint holds a scale of its inputs.

    The parameter has no plain tensor; the loader hands groups to `param.on_groups` instead.
    """

    def __init__(self, param: Param, scheme: Scheme, *, fixed: bool = False) -> None:
        assert param.tensor is not None and param.tensor.dim() == 2, param
        self._param, self._scheme = param, scheme
        self._outputs, self._inputs = param.tensor.shape
        self._waiting: _Unpacked | None = None
        self._packed: PackedWeight | BlockWeight | None = None
        self._lock = Lock()
        self._range = InputRange() if fixed else None
        param.packed_bytes = size_of(scheme, self._outputs, self._inputs)
        for copy in copies(param):
            self._group_columns(copy)
        param.tensor = None
        param.on_groups = self._write
        param.on_filled = self._pack

    def take(self) -> PackedWeight | BlockWeight:
        """The packed weight."""
        packed, self._packed = self._packed, None
        assert packed is not None, f"{self._param.name} was taken before"
        return packed

    def _write(self, copy: Copy, groups: Groups, numbers: Numbers) -> int | None:
        """Keeps one copy; the first of its rows with a scale of NaN or Inf, or None."""
        with self._lock:
            if self._waiting is None:
                self._waiting = _Unpacked(self._outputs, self._inputs, self._scheme)
        source, target = self._group_columns(copy)
        rows, columns = copy.target
        assert isinstance(rows, slice) and isinstance(columns, slice)
        scales = groups.scales_RG.float()
        whole = scales.shape[1] == 1
        scales = scales if whole else scales[:, source]
        bad = ~scales.isfinite().all(1)
        quantized, scales, minima = normal(groups, scales, source, self._scheme, numbers, copy.name)
        check_order(groups, copy, self._scheme)
        if self._range is not None:
            self._range.take(copy, groups, numbers)
        self._waiting.values_OI[rows, columns] = quantized
        self._waiting.scales_OG[rows, target] = scales
        if minima is not None:
            assert self._waiting.minima_OG is not None
            self._waiting.minima_OG[rows, target] = minima
        return int(bad.nonzero()[0]) if bad.any() else None

    def _group_columns(self, copy: Copy) -> tuple[slice, slice]:
        """The groups of a copy, in the checkpoint and here; ConfigError if it cuts one."""
        try:
            return _group_columns(copy, self._scheme, self._inputs)
        except CutGroup as error:
            raise cut_error(self._param, copy.name, error) from error

    def _pack(self) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None, self._param.name
        self._packed = waiting.packed(self._scheme)
        if self._range is not None:
            assert isinstance(self._packed, PackedWeight) and self._range.fixed is not None
            self._packed = with_fixed(self._packed, waiting.values_OI, self._range.fixed)


class _Unpacked:
    """The numbers of a whole weight: int8 values (of e4m3 the bits), float32 scales and minima."""

    def __init__(self, outputs: int, inputs: int, scheme: Scheme) -> None:
        groups = 1 if scheme.group is None else -(-inputs // scheme.group)
        self.values_OI = torch.empty(outputs, inputs, dtype=torch.int8)
        self.scales_OG = torch.empty(outputs, groups)
        self.minima_OG = torch.empty(outputs, groups) if scheme.asymmetric else None

    def packed(self, scheme: Scheme) -> PackedWeight | BlockWeight:
        """The same numbers in panels."""
        outputs, inputs = self.values_OI.shape
        weight = empty_weight(outputs, inputs, scheme)
        for first, rows in chunks(outputs, inputs):
            values, scales = self.values_OI[rows], self.scales_OG[rows]
            if isinstance(weight, PackedWeight):
                write_panels(weight, first, values, scales)
                continue
            minima = None if self.minima_OG is None else self.minima_OG[rows]
            blocks.write_quantized(weight.segments[0], first, values, scales, minima)
        return weight


def check_order(groups: Groups, copy: Copy, scheme: Scheme) -> None:
    """That inputs belong to groups by their place, as the config says."""
    if groups.group_C is None:
        return
    start, stop, _ = copy.source[1].indices(copy.shape[1])
    places = torch.arange(start, stop, device=groups.group_C.device)
    if not torch.equal(groups.group_C, places // (scheme.group or copy.shape[1])):
        raise CheckpointError(
            f"{copy.name}: its group index is not in order, although its quantization_config says "
            "so (desc_act)",
            field="quantization_config",
        )


def normal(
    groups: Groups,
    scales_RG: torch.Tensor,
    source: slice,
    scheme: Scheme,
    numbers: Numbers,
    name: str,
) -> Quantized:
    """Values, scales and minima as a scheme has them: value * scale - minimum."""
    if scheme.floating and scheme.bits == 4:
        return halved(groups.values_RC, scales_RG, scheme.group or 32)
    values, minima = normal_values(groups, scales_RG, source, scheme, numbers, name)
    return values, scales_RG, minima


def normal_values(
    groups: Groups,
    scales_RG: torch.Tensor,
    source: slice,
    scheme: Scheme,
    numbers: Numbers,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values as a scheme has them, and minima: value * scale - minimum. Asymmetric values begin at
    0; those that take 8 bits, and symmetric ones, lie around 0, where unsigned ones have the middle
    of their range."""
    values = groups.values_RC
    if scheme.floating:
        return values.view(torch.int8), None
    half = 1 << (numbers.bits - 1)
    offset = (
        (half if numbers.signed else 0) if scheme.asymmetric else (0 if numbers.signed else -half)
    )
    low = half if scheme.asymmetric and scheme.bits == 8 else 0
    zeros = groups.zeros_RG
    if groups.added_RG is not None:
        minima = -groups.added_RG[:, source] - low * scales_RG
        return (values.to(torch.int16) - low).to(torch.int8), minima
    if scheme.asymmetric:
        assert zeros is not None, name
        minima = (zeros[:, source].float() + (offset - low)) * scales_RG
        return (values.to(torch.int16) + (offset - low)).to(torch.int8), minima
    if zeros is not None and not bool((zeros + offset == 0).all()):
        raise CheckpointError(
            f"{name}: a zero point is not {-offset}, although its quantization_config says that "
            "the format is symmetric",
            field="quantization_config",
        )
    return (values.to(torch.int16) + offset).to(torch.int8), None
