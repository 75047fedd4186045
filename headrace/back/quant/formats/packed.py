"""Integers of 2 to 8 bits packed into words of 32 (GPTQ, AWQ, compressed-tensors and MLX), and of 2
and 4 into bytes (torchao, transformers for its own).

Source: the formats as AutoGPTQ 0.7 and GPTQModel 2, AutoAWQ 0.2 (GEMM), compressed-tensors 0.9,
MLX 0.32 and torchao 0.18 (Int4Tensor) write them. O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, column_groups, fields
from headrace.base.config.quantized_shapes import groups_of
from headrace.base.config.quantized_tensors import QuantizedTensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight fields holds output i: 0, 2, 4, 6 come first, then 1, 3, 5, 7."""


def gptq(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values packed along the inputs [I bits / 32, O], zero points along the outputs [G, O bits /
    32] (in version 1 less one), scales [G, O]; `order` [I] says each input's group (act-order)."""
    numbers = tensor.numbers
    bits = numbers.bits
    packed = read("values", _words(columns, bits), rows).t()
    values = fields(packed, bits, *_within(columns, bits))
    scales_GR = read("scales", slice(None), rows)
    zero_words = read("zeros", slice(None), _words(rows, bits))
    zeros_GR = fields(zero_words, bits, *_within(rows, bits)) + numbers.zero_offset
    return Groups(
        values_RC=values,
        scales_RG=scales_GR.t(),
        zeros_RG=(zeros_GR & ((1 << bits) - 1)).t(),
        group_C=_groups(tensor, read, columns, values.device),
    )


def awq(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [I, O / 8] and zero points [G, O / 8] with eight outputs to a word, interleaved;
    scales [G, O]. Of Quark they may be signed."""
    words = slice(rows.start // 8, -(-rows.stop // 8))
    first = rows.start - words.start * 8

    def outputs(packed: torch.Tensor) -> torch.Tensor:
        order = torch.tensor(AWQ_ORDER, device=packed.device) * 4
        unpacked = ((packed[..., None] >> order) & 15).flatten(-2).to(torch.int16)
        if tensor.numbers.signed:
            unpacked = (unpacked ^ 8) - 8
        return unpacked[:, first : first + rows.stop - rows.start].t()

    values = outputs(read("values", columns, words))
    return Groups(
        values_RC=values,
        scales_RG=read("scales", slice(None), rows).t(),
        zeros_RG=outputs(read("zeros", slice(None), words)) if "zeros" in tensor.members else None,
        group_C=_groups(tensor, read, columns, values.device),
    )


def awq_gemv(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O, I / 8] and zero points [O, Z] in order; scales [O, 8 Z], of which the first G
    count."""
    packed = read("values", rows, _words(columns, 4))
    groups = _num_groups(tensor)
    return Groups(
        values_RC=fields(packed, 4, *_within(columns, 4)),
        scales_RG=read("scales", rows, slice(0, groups)),
        zeros_RG=fields(read("zeros", rows), 4, 0, groups),
        group_C=_groups(tensor, read, columns, packed.device),
    )


def awq_gemv_fast(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Words of 16 bits [O / 4, I]: 64 inputs of four outputs follow each other, of each 32 inputs
    pairs and halves are mixed. Scales and what is added [8 Z, O], of which the first G count."""
    fours = slice(rows.start // 4, -(-rows.stop // 4))
    spans = slice(columns.start // 64, -(-columns.stop // 64))
    words = read("values", fours, slice(spans.start * 64, spans.stop * 64))
    shifts = torch.arange(0, 16, 4, device=words.device)
    nibbles = ((words[..., None].int() >> shifts) & 15).to(torch.int16)
    # [O / 4, spans, output, half, pair of eight, input of two, eight]: inputs by half, eight, pair.
    mixed = nibbles.reshape(len(words), -1, 4, 2, 4, 2, 4)
    values = mixed.permute(0, 2, 1, 3, 6, 4, 5).reshape(4 * len(words), -1)
    groups = slice(0, _num_groups(tensor))
    return Groups(
        values_RC=values[
            rows.start - 4 * fours.start : rows.stop - 4 * fours.start,
            columns.start - 64 * spans.start : columns.stop - 64 * spans.start,
        ],
        scales_RG=read("scales", groups, rows).t().float(),
        added_RG=read("zeros", groups, rows).t().float(),
        group_C=_groups(tensor, read, columns, words.device),
    )


def _num_groups(tensor: QuantizedTensor) -> int:
    return groups_of(tensor.shape[1], (tensor.numbers.group or (1, 0))[1])


def compressed(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O, I bits / 32] with an offset of half the range, as zero points [O bits / 32, G]
    have it; scales [O, G], or one."""
    bits = tensor.numbers.bits
    half = 1 << (bits - 1)
    packed = read("values", rows, _words(columns, bits))
    values = fields(packed, bits, *_within(columns, bits)) - half
    zeros = None
    if "zeros" in tensor.members:
        words = read("zeros", _words(rows, bits), slice(None)).t()
        zeros = (fields(words, bits, *_within(rows, bits)) - half).t()
    one = tensor.numbers.group == (0, 0)
    scales = read("scales").reshape(1, 1) if one else read("scales", rows, slice(None))
    return Groups(
        values_RC=values,
        scales_RG=scales,
        zeros_RG=zeros,
        group_C=_groups(tensor, read, columns, values.device),
    )


def mlx(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O, I bits / 32]; scales and what is added [O, G], floats: value * scale + added."""
    bits = tensor.numbers.bits
    words = read("values", rows, _words(columns, bits)).view(torch.int32)
    return Groups(
        values_RC=fields(words, bits, *_within(columns, bits)),
        scales_RG=read("scales", rows, slice(None)).float(),
        added_RG=read("zeros", rows, slice(None)).float(),
        group_C=_groups(tensor, read, columns, words.device),
    )


def bitblas(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Bytes of values [O, I bits / 8], whose fields in words of 32 bits are mixed below 8 bits, and
    of zero points [G, O bits / 8] in order, lowest first; scales [O, G]. Source: BitBLAS 0.1,
    `interleave_weight` for float16, `general_compress`."""
    bits = tensor.numbers.bits
    per = 32 // bits
    span = slice(columns.start // per, -(-columns.stop // per))
    words = read("values", rows, slice(4 * span.start, 4 * span.stop)).view(torch.int32)
    shifts = torch.tensor(_bitblas_shifts(bits), device=words.device)
    mask = (1 << bits) - 1
    values = ((words[..., None] >> shifts) & mask).flatten(1).to(torch.int16)
    outputs = slice(rows.start * bits // 8, -(-rows.stop * bits // 8))
    zero_bytes = read("zeros", slice(None), outputs).view(torch.uint8)[..., None].int()
    zeros_GO = (zero_bytes >> torch.arange(0, 8, bits, device=words.device)) & mask
    first = rows.start - outputs.start * 8 // bits
    return Groups(
        values_RC=values[:, columns.start - span.start * per :][:, : columns.stop - columns.start],
        scales_RG=read("scales", rows),
        zeros_RG=zeros_GO.flatten(1)[:, first : first + rows.stop - rows.start].t(),
        group_C=_groups(tensor, read, columns, words.device),
    )


def _bitblas_shifts(bits: int) -> list[int]:
    """Where each value of a word lies: even ones in its lower half, odd ones in the upper; of 2
    bits the two bytes in the middle have changed places."""
    if bits == 8:
        return [0, 8, 16, 24]
    shifts = [i % 2 * 16 + i // 2 * bits for i in range(32 // bits)]
    if bits == 4:
        return shifts
    return [shift + {1: 8, 2: -8}.get(shift // 8, 0) for shift in shifts]


def by_row(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values in bytes along the inputs, the first in the lowest bits, with an offset of half the
    range; of 8 bits signed. Scales [O, 1], or of each run of a row."""
    bits = tensor.numbers.bits
    fields_of = 8 // bits
    span = slice(columns.start // fields_of, -(-columns.stop // fields_of))
    stored = read("values", rows, span)
    if bits < 8:
        shifts = torch.arange(0, 8, bits, device=stored.device)
        unsigned = (stored.view(torch.uint8)[..., None].int() >> shifts) & ((1 << bits) - 1)
        stored = unsigned.flatten(1).to(torch.int16) - (1 << (bits - 1))
    scales = read("scales", rows).reshape(rows.stop - rows.start, -1)
    size = 0 if scales.shape[1] == 1 else tensor.shape[1] // scales.shape[1]
    return Groups(
        values_RC=stored[:, columns.start - span.start * fields_of :][
            :, : columns.stop - columns.start
        ],
        scales_RG=scales,
        group_C=column_groups(columns, size, stored.device),
    )


def torchao(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O, I / 2], signed, the first of two in the lower half; scales and zero points [G, O],
    floats: value * scale + zero."""
    halves = slice(columns.start // 2, -(-columns.stop // 2))
    packed = read("values", rows, halves)
    both = torch.stack((packed << 4 >> 4, packed >> 4), -1).flatten(-2)
    first = columns.start % 2
    scales = read("scales", slice(None), rows).t().float()
    return Groups(
        values_RC=both[:, first : first + columns.stop - columns.start],
        scales_RG=scales,
        zeros_RG=-read("zeros", slice(None), rows).t().float() / scales,
        group_C=_groups(tensor, read, columns, packed.device),
    )


def signed_pairs(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O, I / 2], signed, the first of two in the lower half; scales [O, G], floats."""
    halves = slice(columns.start // 2, -(-columns.stop // 2))
    packed = read("values", rows, halves)
    both = torch.stack((packed << 4 >> 4, packed >> 4), -1).flatten(-2)
    first = columns.start % 2
    return Groups(
        values_RC=both[:, first : first + columns.stop - columns.start],
        scales_RG=read("scales", rows, slice(None)).float(),
        group_C=_groups(tensor, read, columns, packed.device),
    )


def modelopt(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Values [O / 2, I], signed, the first of two outputs in the lower half; scales [O, G]."""
    halves = slice(rows.start // 2, -(-rows.stop // 2))
    packed = read("values", halves, columns).view(torch.int8)
    both = torch.stack((packed << 4 >> 4, packed >> 4), 1).flatten(0, 1)
    first = rows.start % 2
    return Groups(
        values_RC=both[first : first + rows.stop - rows.start],
        scales_RG=read("scales", rows, slice(None)),
        group_C=_groups(tensor, read, columns, packed.device),
    )


def _groups(
    tensor: QuantizedTensor, read: Read, columns: slice, device: torch.device
) -> torch.Tensor | None:
    if "order" in tensor.members:
        return read("order", columns).long()
    assert tensor.numbers.group is not None, tensor
    return column_groups(columns, tensor.numbers.group[1], device)


def _words(span: slice, bits: int) -> slice:
    """The words that hold fields span.start .. span.stop, from a word on that begins with a
    field."""
    run = 32 if 32 % bits else 32 // bits
    words = run * bits // 32
    return slice(span.start // run * words, -(-span.stop // run) * words)


def _within(span: slice, bits: int) -> tuple[int, int]:
    """Where the fields begin in these words, and how many they are."""
    run = 32 if 32 % bits else 32 // bits
    return span.start % run, span.stop - span.start
