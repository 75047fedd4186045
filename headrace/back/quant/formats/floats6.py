"""e2m3 and e3m2 numbers of 6 bits, four to three bytes, lowest first, with a power of two for 32
inputs.

Source: Open Compute Project, Microscaling Formats (MX) 1.0, section 5.3.2, as compressed-tensors
0.20 (`mxfp6-pack-quantized`, e2m3) and Quark 0.13 (both) write it.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups
from headrace.back.quant.formats.scaled import powers_of_two
from headrace.base.config.quantized_tensors import QuantizedTensor

_SIZES = [i / 8 for i in range(8)]
_SIZES += [(1 + i / 8) * power for power in (1.0, 2.0, 4.0) for i in range(8)]
E2M3 = (*_SIZES, *(-size for size in _SIZES))
_WIDE = [i / 16 for i in range(4)]
_WIDE += [(1 + i / 4) * 2.0**power for power in range(-2, 5) for i in range(4)]
E3M2 = (*_WIDE, *(-size for size in _WIDE))


def powers(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """value * 2 ** (scale - 127)."""
    runs = slice(columns.start // 4, -(-columns.stop // 4))
    packed = read("values", rows, slice(runs.start * 3, runs.stop * 3)).unflatten(1, (-1, 3)).int()
    words = packed[..., 0] | packed[..., 1] << 8 | packed[..., 2] << 16
    shifts = torch.arange(0, 24, 6, device=packed.device)
    fields = ((words[..., None] >> shifts) & 63).flatten(1)[:, columns.start % 4 :]
    assert tensor.numbers.group is not None, tensor
    levels = E3M2 if tensor.numbers.arrangement.endswith("e3m2") else E2M3
    return Groups(
        values_RC=torch.tensor(levels, device=packed.device)[
            fields[:, : columns.stop - columns.start]
        ],
        scales_RG=powers_of_two(read("scales", rows, slice(None))),
        group_C=column_groups(columns, tensor.numbers.group[1], packed.device),
    )
