"""Quantized matrices as compressed-tensors lays them out, and the section of config.json that says
so: what a checkpoint of ours gives other engines to read.

Source: the formats as compressed-tensors 0.9 reads them. O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F

from headrace.back.quant.scheme import Scheme

WRITTEN = ("int4", "int4-g64", "int4-g128", "int4-asym", "int4-asym-g64", "int4-asym-g128",
           "int8", "int8-g32", "int8-g64", "int8-g128", "fp8")  # fmt: skip
"""Schemes that there is a layout for."""


def written(
    weight_OI: torch.Tensor, scheme: Scheme
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that stand for a weight, by what follows the module's name, and the float32
    weight that they stand for. Scales are bfloat16, one for each output and group; without groups
    float32."""
    values_OI, scales_OG, minima_OG = scheme.quantize(weight_OI)
    if not bool(scales_OG.isfinite().all()):
        raise ValueError("holds NaN or Inf")
    if scheme.group is None:
        stored = values_OI.view(torch.float8_e4m3fn) if scheme.floating else values_OI
        return {"weight": stored, "weight_scale": scales_OG}, stored.float() * scales_OG
    scales = torch.where(scales_OG == 0, 1.0, scales_OG)
    half = 1 << (scheme.bits - 1)
    zeros_OG = torch.zeros_like(scales, dtype=torch.int32)
    if minima_OG is not None:  # a zero point is a whole number: the minimum moves to the nearest
        zeros_OG = (minima_OG / scales).round().clamp(0, 2 * half - 1).int()
        each = slice(0, weight_OI.shape[1])
        wide = scales.repeat_interleave(scheme.group, 1)[:, each]
        shift = zeros_OG.repeat_interleave(scheme.group, 1)[:, each]
        values_OI = ((weight_OI.float() / wide).round() + shift).clamp(0, 2 * half - 1).int()
    fields_OI = values_OI.int() + (0 if scheme.asymmetric else half)
    tensors = {
        "weight_packed": packed(fields_OI, scheme.bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight_OI.shape, dtype=torch.int64),
    }
    if scheme.asymmetric:
        tensors["weight_zero_point"] = (
            packed(zeros_OG.t().contiguous(), scheme.bits).t().contiguous()
        )
    exact = (
        fields_OI
        - (zeros_OG if scheme.asymmetric else half + 0 * zeros_OG).repeat_interleave(
            scheme.group, 1
        )[:, : weight_OI.shape[1]]
    )
    return tensors, exact * scales.repeat_interleave(scheme.group, 1)[:, : weight_OI.shape[1]]


def packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned fields [R, C] in words of 32 bits [R, ceil(C bits / 32)], lowest bits first."""
    per = 32 // bits
    padded = F.pad(fields.long(), (0, -fields.shape[1] % per)).unflatten(1, (-1, per))
    words = (padded << torch.arange(per) * bits).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def takes(shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether a weight of this shape can be written: groups and zero points are whole words."""
    outputs, inputs = shape
    per = 32 // scheme.bits
    whole = scheme.group is None or inputs % scheme.group == 0
    return whole and (not scheme.asymmetric or outputs % per == 0)


def config(scheme: Scheme, ignored: Collection[str]) -> dict[str, Any]:
    """`quantization_config`: all linear modules but the `ignored` ones. With a scale per output
    activations are quantized as they come, in 8 bits a token; else they stay as they are."""
    kind = "float" if scheme.floating else "int"
    strategy = "channel" if scheme.group is None else "group"
    activations = _arguments(8, kind, "token", dynamic=True) if scheme.group is None else None
    weights = _arguments(scheme.bits, kind, strategy, symmetric=not scheme.asymmetric)
    form = {None: "float-quantized" if scheme.floating else "int-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": form.get(scheme.group, "pack-quantized"),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | {"group_size": scheme.group},
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": sorted(ignored),
    }


def _arguments(
    bits: int, kind: str, strategy: str, *, symmetric: bool = True, dynamic: bool = False
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": dynamic,
        "actorder": None,
        "group_size": None,
    }
