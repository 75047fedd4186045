"""BitNet's weights of -1, 0 and 1 (Ma et al. 2024), one more than which takes two bits: a byte
holds four rows, which stand a quarter of the weight apart, the first in the lowest bits. One scale
for all. Source: transformers 5.23, `integrations/bitnet.py`.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read
from headrace.base.config.quantized_tensors import QuantizedTensor

QUARTERS = 4


def times(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """AutoBitLinear: values times the scale."""
    return Groups(
        values_RC=_values(tensor, read, rows, columns),
        scales_RG=read("scales").reshape(1, 1).float(),
    )


def over(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """BitLinear: values divided by the scale."""
    return Groups(
        values_RC=_values(tensor, read, rows, columns),
        scales_RG=1.0 / read("scales").reshape(1, 1).float(),
    )


def _values(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> torch.Tensor:
    step = tensor.shape[0] // QUARTERS
    parts = []
    for part in range(rows.start // step, -(-rows.stop // step)):
        here = slice(max(rows.start - part * step, 0), min(rows.stop - part * step, step))
        bits = (read("values", here, columns) >> 2 * part) & 3
        parts.append(bits.to(torch.int8) - 1)
    return torch.cat(parts)
