"""Hadamard matrices that weights were rotated with, undone block by block or as a whole.

Those of orders that are no powers of two: Paley's of both kinds (1933) and Williamson's (1944), as
Sloane's list has them (neilsloane.com/hadamard).
"""

from __future__ import annotations

from functools import cache

import torch

from headrace.base.config.looked_up_arrangements import hadamard_order


def rotated_back(weight_OI: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks of `size` inputs, a power of two, times Sylvester's matrix over the root of its size,
    which is its own inverse."""
    blocks = weight_OI.unflatten(1, (-1, size))
    apart = 1
    while apart < size:
        first, second = blocks.unflatten(2, (-1, 2, apart)).unbind(3)
        blocks = torch.stack((first + second, first - second), 3).flatten(2)
        apart *= 2
    return blocks.flatten(1) * size**-0.5


def rotated_whole(rows_RN: torch.Tensor) -> torch.Tensor:
    """Each row as a column behind the Hadamard matrix of its length over its root: one of the
    orders that are known by one of a power of two."""
    length = rows_RN.shape[1]
    order = hadamard_order(length)
    assert order is not None, length
    inner = rotated_back(rows_RN, length // order) if length > order else rows_RN
    if order == 1:
        return inner
    mixed = hadamard(order).to(rows_RN.device) @ inner.unflatten(1, (order, -1))
    return mixed.flatten(1) * order**-0.5


_WILLIAMSON = {
    52: (0x14F2, 0x11F8, 0x1A65, 0x1090),
    156: (0x7282619053, 0x7898528647, 0x73452128B3, 0x46A0EDC158),
    172: (0x467AECDD798, 0x6FC29B650FD, 0x7595E85EA6B, 0x63D260192F1),
}
"""First rows of four circulant matrices, a bit a sign, the first highest."""
_SKEW, _SYMMETRIC = (12, 20, 60, 108, 140), (28, 36)
"""Orders q + 1 of primes q, and twice that: Paley's first kind and second."""


@cache
def hadamard(order: int) -> torch.Tensor:
    """float32 [order, order] of 1 and -1."""
    if order in _WILLIAMSON:
        a, b, c, d = (_circulant(_signs(bits, order // 4)) for bits in _WILLIAMSON[order])
        blocks = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
        return torch.cat([torch.cat(row, 1) for row in blocks])
    if order in _SKEW:
        matrix = torch.ones(order, order)
        matrix[0, 1:] = -1
        matrix[1:, 1:] = torch.eye(order - 1) - _residues(order - 1)
        return matrix
    assert order in _SYMMETRIC, order
    conference = torch.ones(order // 2, order // 2)
    conference[0, 0] = 0
    conference[1:, 1:] = _residues(order // 2 - 1)
    one = torch.eye(order // 2)
    rows = ((conference + one, conference - one), (conference - one, -conference - one))
    return torch.cat([torch.cat(row, 1) for row in rows])


def _residues(prime: int) -> torch.Tensor:
    """1 where the difference of column and row is a square of the prime's field, -1 where it is
    not, 0 where it is 0."""
    squares = {i * i % prime for i in range(1, prime)}
    return _circulant([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)])


def _circulant(first: list[float]) -> torch.Tensor:
    row = torch.tensor(first)
    return torch.stack([row.roll(i) for i in range(len(first))])


def _signs(bits: int, count: int) -> list[float]:
    return [1.0 if bits >> count - 1 - i & 1 else -1.0 for i in range(count)]
