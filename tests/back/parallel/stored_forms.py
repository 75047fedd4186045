"""Every form that checkpoints store weights in, as a bundle beside its plain meaning, for tests.

The formats are those of GPTQ (both conventions of zeros, with and without act-order), AWQ,
compressed-tensors, block-scaled fp8, NVFP4, MXFP4 and a plain scale per output or group. What is
here is only what slicing needs: which tensors there are, how they lie, and what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.parallel.bundle import (
    FP8,
    INT8,
    Bundle,
    Dim,
    Member,
    Number,
    WeightForm,
    Zeros,
)

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
O, I = 0, 1


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """A bundle, random tensors of it for a weight, and what they mean in float32 [O, I]."""

    name: str
    bundle: Bundle
    dequantize: Callable[[Tensors], torch.Tensor]
    units: tuple[int, int]
    """Outputs and inputs that a split must keep together."""

    def random(self, shape: tuple[int, ...], seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        return {
            member.name: _random(member, member.shape(shape), shape, generator)
            for member in self.bundle.members
        }


def _random(
    member: Member, sizes: tuple[int, ...], weight: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    if member.name.endswith("g_idx"):
        groups = weight[-1] // 8
        return torch.randperm(weight[-1], generator=generator).remainder(groups).to(torch.int32)
    if member.dtype in (torch.int32, torch.uint8, torch.int8):
        info = torch.iinfo(member.dtype)
        return torch.randint(info.min, info.max, sizes, generator=generator).to(member.dtype)
    if member.dtype == torch.float8_e8m0fnu:
        return torch.randint(120, 134, sizes, generator=generator, dtype=torch.uint8).view(
            torch.float8_e8m0fnu
        )
    return (torch.rand(sizes, generator=generator) + 0.1).to(member.dtype)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [..., W] -> values [..., W * word bits / bits], lowest bits first."""
    count = words.element_size() * 8 // bits
    shifts = torch.arange(count) * bits
    return (words.long()[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def spread(scales: torch.Tensor, per: int, size: int, dim: int) -> torch.Tensor:
    """Each scale `per` times along a dimension of `size`."""
    return scales.repeat_interleave(per, dim).narrow(dim, 0, size)


def _plain(form: WeightForm, dtype: torch.dtype, name: str) -> StoredForm:
    bundle = Bundle(
        form=form,
        members=(
            Member(name="weight", dtype=dtype, dims=(Dim(O), Dim(I))),
            Member(name="weight_scale", dtype=torch.float32, dims=(Dim(O), Dim(I, per=0))),
        ),
    )
    return StoredForm(
        name=name,
        bundle=bundle,
        units=(1, 1),
        dequantize=lambda t: t["weight"].float() * t["weight_scale"],
    )


def _int4(group: int) -> StoredForm:
    form = WeightForm(
        bits=4, number=Number.UINT, group=(1, group), scale_dtype=torch.bfloat16, zeros=Zeros.MINIMUM
    )  # fmt: skip
    grouped = (Dim(O), Dim(I, per=group))
    bundle = Bundle(
        form=form,
        members=(
            Member(name="weight", dtype=torch.uint8, dims=(Dim(O), Dim(I, per=2))),
            Member(name="scales", dtype=torch.bfloat16, dims=grouped),
            Member(name="minima", dtype=torch.bfloat16, dims=grouped),
        ),
    )

    def dequantize(t: Tensors) -> torch.Tensor:
        values = unpack(t["weight"], 4).float()
        scales, minima = (
            spread(t[n].float(), group, values.shape[1], 1) for n in ("scales", "minima")
        )
        return values * scales - minima

    return StoredForm(name="int4", bundle=bundle, units=(1, group), dequantize=dequantize)


def _fp8_blocks() -> StoredForm:
    form = WeightForm(
        bits=8, number=Number.FLOAT8_E4M3, group=(128, 128), scale_dtype=torch.float32
    )
    bundle = Bundle(
        form=form,
        members=(
            Member(name="weight", dtype=torch.float8_e4m3fn, dims=(Dim(O), Dim(I))),
            Member(
                name="weight_scale_inv",
                dtype=torch.float32,
                dims=(Dim(O, per=128), Dim(I, per=128)),
            ),
        ),
    )

    def dequantize(t: Tensors) -> torch.Tensor:
        outputs, inputs = t["weight"].shape
        scales = spread(spread(t["weight_scale_inv"], 128, outputs, 0), 128, inputs, 1)
        return t["weight"].float() * scales

    return StoredForm(name="fp8 128x128", bundle=bundle, units=(128, 128), dequantize=dequantize)


def _gptq(*, act_order: bool, v2: bool) -> StoredForm:
    """qweight int32 [I / 8, O]; qzeros int32 [G, O / 8], stored less one in v1; scales [G, O]."""
    group = 8
    form = WeightForm(
        bits=4, number=Number.UINT, group=(1, group), scale_dtype=torch.float16,
        zeros=Zeros.INTEGER, ordered=act_order,
    )  # fmt: skip
    groups = Dim(None, width=32 // group) if act_order else Dim(I, per=group)
    index = Member(name="g_idx", dtype=torch.int32, dims=(Dim(I),))
    bundle = Bundle(
        form=form,
        members=(
            Member(name="qweight", dtype=torch.int32, dims=(Dim(I, per=8), Dim(O))),
            Member(name="qzeros", dtype=torch.int32, dims=(groups, Dim(O, per=8))),
            Member(name="scales", dtype=torch.float16, dims=(groups, Dim(O))),
            *((index,) if act_order else ()),
        ),
    )

    def dequantize(t: Tensors) -> torch.Tensor:
        values_OI = unpack(t["qweight"].T, 4)
        zeros_GO = unpack(t["qzeros"], 4) + (0 if v2 else 1)
        group_I = t["g_idx"].long() if act_order else torch.arange(values_OI.shape[1]) // group
        return (values_OI - zeros_GO[group_I].T).float() * t["scales"].float()[group_I].T

    name = f"gptq v{2 if v2 else 1}{' act-order' if act_order else ''}"
    return StoredForm(name=name, bundle=bundle, units=(8, 8), dequantize=dequantize)


def _awq() -> StoredForm:
    """qweight int32 [I, O / 8], its eight outputs interleaved as 0 2 4 6 1 3 5 7."""
    group = 16
    form = WeightForm(
        bits=4, number=Number.UINT, group=(1, group), scale_dtype=torch.float16, zeros=Zeros.INTEGER
    )
    packed = Dim(O, per=8)
    bundle = Bundle(
        form=form,
        members=(
            Member(name="qweight", dtype=torch.int32, dims=(Dim(I), packed)),
            Member(name="qzeros", dtype=torch.int32, dims=(Dim(I, per=group), packed)),
            Member(name="scales", dtype=torch.float16, dims=(Dim(I, per=group), Dim(O))),
        ),
    )
    place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def plain(words: torch.Tensor) -> torch.Tensor:
        return unpack(words, 4).unflatten(1, (-1, 8))[..., place].flatten(1)

    def dequantize(t: Tensors) -> torch.Tensor:
        values = plain(t["qweight"])
        zeros, scales = (
            spread(x, group, len(values), 0) for x in (plain(t["qzeros"]), t["scales"])
        )
        return ((values - zeros).float() * scales.float()).T

    return StoredForm(name="awq", bundle=bundle, units=(8, group), dequantize=dequantize)


def _compressed() -> StoredForm:
    """compressed-tensors pack-quantized: weight_packed int32 [O, I / 8], zeros packed over O."""
    group = 16
    form = WeightForm(
        bits=4,
        number=Number.UINT,
        group=(1, group),
        scale_dtype=torch.bfloat16,
        zeros=Zeros.INTEGER,
    )
    groups = Dim(I, per=group)
    bundle = Bundle(
        form=form,
        members=(
            Member(name="weight_packed", dtype=torch.int32, dims=(Dim(O), Dim(I, per=8))),
            Member(name="weight_scale", dtype=torch.bfloat16, dims=(Dim(O), groups)),
            Member(name="weight_zero_point", dtype=torch.int32, dims=(Dim(O, per=8), groups)),
        ),
    )

    def dequantize(t: Tensors) -> torch.Tensor:
        values = unpack(t["weight_packed"], 4)
        zeros = unpack(t["weight_zero_point"].T, 4).T
        zeros, scales = (spread(x, group, values.shape[1], 1) for x in (zeros, t["weight_scale"]))
        return (values - zeros).float() * scales.float()

    return StoredForm(
        name="compressed-tensors", bundle=bundle, units=(8, group), dequantize=dequantize
    )


def _nvfp4() -> StoredForm:
    """E2M1 values, an e4m3 scale for 16 inputs, one float32 scale for the tensor."""
    form = WeightForm(
        bits=4,
        number=Number.FLOAT4_E2M1,
        group=(1, 16),
        scale_dtype=torch.float8_e4m3fn,
        outer=(0, 0),
    )
    bundle = Bundle(
        form=form,
        members=(
            Member(name="weight", dtype=torch.uint8, dims=(Dim(O), Dim(I, per=2))),
            Member(name="weight_scale", dtype=torch.float8_e4m3fn, dims=(Dim(O), Dim(I, per=16))),
            Member(name="weight_scale_2", dtype=torch.float32, dims=(), per_piece=True),
        ),
    )

    def dequantize(t: Tensors) -> torch.Tensor:
        values = E2M1[unpack(t["weight"], 4)]
        scales = spread(t["weight_scale"].float(), 16, values.shape[1], 1)
        return values * scales * t["weight_scale_2"].reshape(-1)[0]

    return StoredForm(name="nvfp4", bundle=bundle, units=(1, 16), dequantize=dequantize)


def _mxfp4() -> StoredForm:
    """E2M1 values in blocks of 32 (16 bytes), a power of two for each."""
    form = WeightForm(
        bits=4, number=Number.FLOAT4_E2M1, group=(1, 32), scale_dtype=torch.float8_e8m0fnu
    )
    bundle = Bundle(
        form=form,
        members=(
            Member(
                name="weight_blocks",
                dtype=torch.uint8,
                dims=(Dim(O), Dim(I, per=32), Dim(None, width=16)),
            ),
            Member(name="weight_scales", dtype=torch.float8_e8m0fnu, dims=(Dim(O), Dim(I, per=32))),
        ),
    )

    def dequantize(t: Tensors) -> torch.Tensor:
        values = E2M1[unpack(t["weight_blocks"], 4)].flatten(1)
        return values * spread(t["weight_scales"].float(), 32, values.shape[1], 1)

    return StoredForm(name="mxfp4", bundle=bundle, units=(1, 32), dequantize=dequantize)


FORMS = [
    _plain(INT8, torch.int8, "int8"),
    _plain(FP8, torch.float8_e4m3fn, "fp8"),
    _int4(32),
    _fp8_blocks(),
    *(_gptq(act_order=order, v2=v2) for order in (False, True) for v2 in (False, True)),
    _awq(),
    _compressed(),
    _nvfp4(),
    _mxfp4(),
]
