"""What every format's reader returns, and what they share: bit fields, and groups of columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError

Read = Callable[..., torch.Tensor]
"""`read(role, *slices)`: that part of a member, the leading index of its expert left out."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A rectangle of a weight: (value - zero) * scale + added.

    values_RC    integers or floats, in any dtype
    scales_RG    floats
    zeros_RG     None: 0
    added_RG     floats; None: 0. Beside it there are no zeros
    group_C      int64, which group a column belongs to; None: column c to c * G // C
    inputs       float32 [1], the scale that the checkpoint holds for what is multiplied with it;
                 None: none
    input_zero   the zero point beside it; None: 0
    """

    values_RC: torch.Tensor
    scales_RG: torch.Tensor
    zeros_RG: torch.Tensor | None = None
    added_RG: torch.Tensor | None = None
    group_C: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
    input_zero: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """float32 [R, C]."""
        values = self.values_RC.float()
        if self.zeros_RG is not None:
            values = values - self._columns(self.zeros_RG.float())
        values = values * self._columns(self.scales_RG.float())
        return values if self.added_RG is None else values + self._columns(self.added_RG)

    def times_inputs(self, factor_C: torch.Tensor) -> Groups:
        """The same with the columns multiplied: each is a group then."""
        assert self.added_RG is None, "nothing is added in formats that multiply inputs"
        columns = len(factor_C)
        ones = self.scales_RG.new_ones(1, columns)
        scales, zeros = self._columns(self.scales_RG.float()), self.zeros_RG
        return Groups(
            values_RC=self.values_RC,
            scales_RG=scales * ones * factor_C.float(),
            zeros_RG=None if zeros is None else self._columns(zeros.float()) * ones,
            group_C=torch.arange(columns, device=factor_C.device),
        )

    def _columns(self, by_group_RG: torch.Tensor) -> torch.Tensor:
        if by_group_RG.shape[1] == 1:
            return by_group_RG
        assert self.group_C is not None
        return by_group_RG[:, self.group_C]


def joined(parts: list[Groups]) -> Groups:
    """Rectangles one below the other, in the same columns."""
    first, *more = parts
    if not more:
        return first
    scales = [part.scales_RG for part in parts]
    one = len(first.scales_RG) == 1 and len(first.values_RC) > 1
    zeros = [part.zeros_RG for part in parts if part.zeros_RG is not None]
    added = [part.added_RG for part in parts if part.added_RG is not None]
    return Groups(
        values_RC=torch.cat([part.values_RC for part in parts]),
        scales_RG=first.scales_RG if one else torch.cat(scales),
        zeros_RG=torch.cat(zeros) if zeros else None,
        added_RG=torch.cat(added) if added else None,
        group_C=first.group_C,
        inputs=first.inputs,
        input_zero=first.input_zero,
    )


def column_groups(columns: slice, group: int, device: torch.device) -> torch.Tensor | None:
    """The group of each column, of groups of that many neighbours; None: all are one group."""
    if group == 0:
        return None
    return torch.arange(columns.start, columns.stop, device=device) // group


def fields(words: torch.Tensor, bits: int, first: int, count: int) -> torch.Tensor:
    """Fields first .. first + count of a stream of bits along the last dimension, lowest bits
    first, as int16; a field may lie across two words. `words` int32 [..., W], of which the first
    begins with field 0."""
    return wide_fields(words, bits, first, count).to(torch.int16)


def wide_fields(words: torch.Tensor, bits: int, first: int, count: int) -> torch.Tensor:
    """The same of up to 32 bits, as int64."""
    at = torch.arange(first, first + count, device=words.device) * bits
    word, shift = at // 32, at % 32
    wide = words.long() & 0xFFFFFFFF
    low = wide[..., word] >> shift
    if 32 % bits:
        after = wide[..., (word + 1).clamp(max=words.shape[-1] - 1)]
        low = low | torch.where(shift + bits > 32, after << (32 - shift), 0)
    return low & ((1 << bits) - 1)


def inverse_order(tensor: QuantizedTensor, stored: torch.Tensor) -> torch.Tensor:
    """Where each input stands; CheckpointError if that is no order."""
    order = stored.long() & 0xFFFF if stored.dtype == torch.int16 else stored.long()
    inverse = order.argsort()
    if not torch.equal(order[inverse], torch.arange(len(order), device=order.device)):
        raise CheckpointError(f"{tensor.members['order']}: is no order of {len(order)} inputs")
    return inverse
