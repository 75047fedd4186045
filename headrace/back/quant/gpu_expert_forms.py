"""The forms in which GPUs keep the numbers of a mixture's experts, by scheme or type: what holds
them, what they take, and how floats become them.

X experts, E width, I inner size; O outputs and I inputs of a matrix, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.experts_bytes import layout as eight
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_fp8 import layout as fp8
from headrace.back.kernels.experts_int4 import layout as int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.quant.gguf_int4 import BLOCK_TYPES, BlockType
from headrace.back.quant.gpu import GPU_SCHEMES, HELD_AS
from headrace.back.quant.gpu_int4 import INT4_SCHEMES, made_of
from headrace.back.quant.gpu_int8 import BYTE_TYPES, INT8_SCHEMES, ByteBlocks
from headrace.back.quant.kept import (
    LEVELLED,
    MICROSCALED,
    STORED_SCALE,
)
from headrace.back.quant.scheme import ONLINE_SCHEMES

GpuExperts = fp8.Fp8Experts | int4.Int4Experts | eight.ByteExperts
Numbers3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Values [O, I], scales and minima [O, G]."""


@dataclass(frozen=True)
class MixtureSizes:
    """Of a layer's experts on this rank."""

    experts: int
    width: int
    inner: int

    def of(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a "gate", an "up" or a "down"."""
        return (self.width, self.inner) if name == "down" else (self.inner, self.width)


class Kept(Protocol):
    """What keeps a scheme's numbers."""

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """Experts to be filled."""
        ...

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Of one matrix."""
        ...

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """Fills one matrix."""
        ...

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """What `write` takes, of floats."""
        ...


@dataclass(frozen=True)
class KeptFp8:
    """e4m3 numbers; `group`: see ScaledMatrices. `online`: the scheme of those made while loading;
    `fixed`: the checkpoint holds scales of their inputs."""

    group: int | None
    online: str = "fp8"
    fixed: bool = False

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """See Kept."""
        return fp8.empty_experts(
            self.group, sizes.experts, sizes.width, sizes.inner, device=device, fixed=self.fixed
        )

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """See Kept."""
        return fp8.matrix_bytes(outputs, inputs, self.group)

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """See Kept; values are bits or numbers."""
        assert isinstance(experts, fp8.Fp8Experts)
        _write_rows(experts.down if name == "down" else experts.up, name, expert, numbers)

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """See Kept."""
        return ONLINE_SCHEMES[self.online].quantize(weight_OI)


def _write_rows(matrices: fp8.ScaledMatrices, name: str, expert: int, numbers: Numbers3) -> None:
    values_OI, scales_OG, _ = numbers
    rows = slice(0, len(values_OI))
    if name == "up":
        rows = slice(len(values_OI), 2 * len(values_OI))
    target = matrices.values_XOI[expert].view(torch.uint8)
    target[rows] = values_OI.view(torch.uint8).to(target.device)
    matrices.scales_XGO[expert, :, rows] = scales_OG.T.to(target.device)


@dataclass(frozen=True)
class KeptBytes:
    """8-bit integers, and MXFP8; `online`: the scheme of those made while loading."""

    form: ByteForm
    online: str

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """See Kept."""
        return eight.empty_experts(
            self.form, sizes.experts, sizes.width, sizes.inner, device=device
        )

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """See Kept."""
        return fp8.matrix_bytes(outputs, inputs, self.form.group)

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """See Kept; values are bits or numbers."""
        assert isinstance(experts, eight.ByteExperts) and numbers[2] is None
        _write_rows(experts.down if name == "down" else experts.up, name, expert, numbers)

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """See Kept."""
        return ONLINE_SCHEMES[self.online].quantize(weight_OI)


@dataclass(frozen=True)
class KeptInt4:
    """4-bit numbers of a scheme."""

    scheme: str

    @property
    def form(self) -> Int4Form:
        """What the numbers are."""
        scheme = INT4_SCHEMES[self.scheme]
        return Int4Form(scheme.group, scheme.asymmetric, scheme.floating)

    def empty(self, sizes: MixtureSizes, dtype: torch.dtype, device: torch.device) -> GpuExperts:
        """See Kept."""
        return int4.empty_experts(
            self.form, sizes.experts, sizes.width, sizes.inner, dtype=dtype, device=device
        )

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """See Kept."""
        return int4.matrix_bytes(self.form, outputs, inputs, dtype=dtype)

    def write(self, experts: GpuExperts, name: str, expert: int, numbers: Numbers3) -> None:
        """See Kept."""
        assert isinstance(experts, int4.Int4Experts)
        device = experts.up.words_NBW.device
        values, scales, minima = numbers
        lows = None if minima is None else minima.to(device)
        int4.write_matrix(experts, name, expert, values.to(device), scales.to(device), lows)

    def quantize(self, weight_OI: torch.Tensor) -> Numbers3:
        """See Kept."""
        return made_of(weight_OI, INT4_SCHEMES[self.scheme])


def kept_of(scheme: str) -> Kept | None:
    """What keeps a scheme's or type's numbers, None: nothing does."""
    stored = HELD_AS.get(scheme, scheme)
    if scheme in LEVELLED:
        return None
    if stored == MICROSCALED:
        return KeptBytes(ByteForm(32, floats=True), "mxfp8")
    if scheme in INT8_SCHEMES:
        return KeptBytes(ByteForm(INT8_SCHEMES[scheme].group), scheme)
    if scheme in BYTE_TYPES:
        kind = BYTE_TYPES[scheme]
        return None if kind.minima else KeptBytes(ByteForm(kind.group), "")
    if stored in GPU_SCHEMES:
        online, fixed = scheme if scheme in HELD_AS else "fp8", scheme.endswith(STORED_SCALE)
        return KeptFp8(GPU_SCHEMES[stored], online, fixed)
    if scheme in BLOCK_TYPES:
        scheme = BLOCK_TYPES[scheme].scheme
    return KeptInt4(scheme) if scheme in INT4_SCHEMES else None


def group_of(scheme: str) -> int:
    """Inputs that a cut must not part; 0: any cut will do."""
    if scheme in TYPES:
        return TYPES[scheme].block
    if scheme in GPU_SCHEMES:
        return GPU_SCHEMES[scheme] or 0
    return ({**INT4_SCHEMES, **INT8_SCHEMES}[scheme]).group or 0


TYPES: dict[str, BlockType | ByteBlocks] = {**BLOCK_TYPES, **BYTE_TYPES}  # of GGUF
