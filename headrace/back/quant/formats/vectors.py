"""Weights whose values are vectors of codebooks: each index stands for several neighbours.

Source: AQLM (Egiazarian et al. 2024, as aqlm 1.1 stores it) and VPTQ (Liu et al. 2024, as vptq
0.0.5 stores it). O outputs, I inputs.
"""

from __future__ import annotations

import torch

from headrace.back.quant.formats.groups import Groups, Read, inverse_order, wide_fields
from headrace.base.config.quantization import Codebook
from headrace.base.config.quantized_tensors import QuantizedTensor
from headrace.base.errors import CheckpointError


def aqlm(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """The sum of a vector of each codebook [books, vectors, outputs, inputs], by `codes` [O /
    outputs, I / inputs, books], times a scale [O / outputs, 1, 1, 1]."""
    book = _book(tensor)
    across = slice(rows.start // book.outputs, -(-rows.stop // book.outputs))
    along = slice(columns.start // book.inputs, -(-columns.stop // book.inputs))
    places = read("values", across, along).long() & ((1 << book.bits) - 1)
    books = read("codebooks").float()
    vectors = sum(books[i][places[..., i]] for i in range(book.books))
    assert isinstance(vectors, torch.Tensor)
    scales = read("scales", across).float().flatten().repeat_interleave(book.outputs)
    values = vectors.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    top, left = rows.start - across.start * book.outputs, columns.start - along.start * book.inputs
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return Groups(
        values_RC=values[top : top + height, left : left + width],
        scales_RG=scales[top : top + height, None],
    )


def vptq(tensor: QuantizedTensor, read: Read, rows: slice, columns: slice) -> Groups:
    """Vectors of outputs, plus one of the second codebook: both indices lie in one field. Inputs
    are in another order, outliers first; `scales` and what is added [I] are of the true order."""
    book = _book(tensor)
    across = slice(rows.start // book.outputs, -(-rows.stop // book.outputs))
    packed = read("values", slice(None), across)
    index = wide_fields(packed, book.bits + book.residual_bits, 0, book.run)
    values = _looked_up(read("codebooks"), index & ((1 << book.bits) - 1), book.outputs)
    if book.residual_bits:
        values = values + _looked_up(read("residual"), index >> book.bits, book.outputs)
    first = rows.start - across.start * book.outputs
    values = values[first : first + rows.stop - rows.start]
    if book.outliers:
        values = torch.cat((_outliers(tensor, read, rows), values), 1)
    order = torch.arange(columns.start, columns.stop, device=values.device)
    if "order" in tensor.members:
        order = inverse_order(tensor, read("order"))[columns]
    values = values[:, order]
    if "scales" in tensor.members:
        values = values * read("scales", columns).float()
    if "added" in tensor.members:
        values = values + read("added", columns).float()
    return Groups(values_RC=values, scales_RG=values.new_ones(1, 1))


def _looked_up(books: torch.Tensor, index: torch.Tensor, outputs: int) -> torch.Tensor:
    """float32 [V outputs, B C] of indices [B, V, C] into vectors of so many outputs."""
    parts = [
        table.view(-1, outputs).float()[places] for table, places in zip(books, index, strict=True)
    ]
    return torch.cat(parts, 1).transpose(1, 2).flatten(0, 1)


def _outliers(tensor: QuantizedTensor, read: Read, rows: slice) -> torch.Tensor:
    outputs = _book(tensor).outlier_outputs
    across = slice(rows.start // outputs, -(-rows.stop // outputs))
    index = read("outliers", slice(None), across).contiguous().view(torch.int16).long() & 0xFFFF
    book = read("outlier_book")
    if book.numel() % outputs or int(index.max()) >= book.numel() // outputs:
        raise CheckpointError(
            f"{tensor.members['outliers']}: index {int(index.max())} of "
            f"{book.numel() / outputs:g} vectors of {outputs} outputs"
        )
    first = rows.start - across.start * outputs
    return _looked_up(book, index, outputs)[first : first + rows.stop - rows.start]


def _book(tensor: QuantizedTensor) -> Codebook:
    assert tensor.numbers.codebook is not None, tensor
    return tensor.numbers.codebook
