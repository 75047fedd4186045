"""bitsandbytes' 4-bit weights: indices of 16 levels (nf4, Dettmers et al. 2023, appendix E; or
fp4), two to a byte, the first in the upper half, in runs that share a scale through the whole
weight.

The scales may be quantized themselves: indices of 256 levels with a scale for 256 of them, and a
mean.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from headrace.back.quant.formats.groups import Groups, Read
from headrace.base.config.levels import LEVELS
from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError


def levels(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """level * scale; a run may begin within a row, so each value is given its own scale."""
    state = _state(tensor, read)
    inputs = tensor.shape[-1]
    first, last = rows.start * inputs, rows.stop * inputs
    packed = read("values").flatten().view(torch.uint8)[first // 2 : -(-last // 2)]
    index = torch.stack((packed >> 4, packed & 15), -1).flatten()[first % 2 :][: last - first]
    values = read("levels").float()[index.int()].view(-1, inputs)[:, columns]
    runs = torch.arange(first, last, device=packed.device) // int(state["blocksize"])
    scales = _scales(tensor, read, state)[runs].view(-1, inputs)[:, columns]
    return Groups(values_RC=values * scales, scales_RG=values.new_ones(1, 1))


def bits(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """The indices themselves, of runs that lie within rows; levels must be those of their kind."""
    state, inputs = _state(tensor, read), tensor.shape[-1]
    kind = "nf4" if "nf4" in tensor.members else "fp4"
    table = read("levels").float().flatten()
    expected = torch.tensor(LEVELS[kind], device=table.device)
    if table.shape != expected.shape or not torch.allclose(table, expected, atol=1e-6):
        raise CheckpointError(
            f"{tensor.members['levels']}: holds other levels than {kind} has",
            field="quantization_config",
        )
    first, last = rows.start * inputs, rows.stop * inputs
    packed = read("values").flatten().view(torch.uint8)[first // 2 : -(-last // 2)]
    index = torch.stack((packed >> 4, packed & 15), -1).view(-1, inputs)[:, columns]
    size = int(state["blocksize"])
    scales = _scales(tensor, read, state)[first // size : last // size].view(-1, inputs // size)
    return Groups(
        values_RC=index,
        scales_RG=scales,
        group_C=torch.arange(columns.start, columns.stop, device=index.device) // size,
    )


def _scales(tensor: QuantizedTensor, read: Read, state: dict[str, Any]) -> torch.Tensor:
    stored = read("scales")
    if "nested_scales" not in tensor.members:
        return stored.float()
    nested = read("nested_scales").float()
    runs = torch.arange(len(stored), device=stored.device) // int(state["nested_blocksize"])
    levels = read("nested_levels").float()
    return levels[stored.int()] * nested[runs] + float(state["nested_offset"])


def _state(tensor: QuantizedTensor, read: Read) -> dict[str, Any]:
    role = "nf4" if "nf4" in tensor.members else "fp4"
    state: dict[str, Any] = json.loads(bytes(read(role).cpu().tolist()))
    return state
