"""What hashes of the n-grams that end with a byte add to its embedding: a row of a table for each
hash function and each length (Byte Latent Transformer, Pagnoni et al. 2024, arXiv:2412.09871,
section 3.2.1; the hash, its primes and its overflow are those of transformers 5.23,
modeling_blt.py).

T bytes, E hidden size, N longest n-gram, H hashes: functions times lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.scope import Scope

PRIMES = (
    *(1_000_000_007, 5_915_587_277, 1_500_450_271, 3_267_000_013, 5_754_853_343, 4_093_082_899),
    *(9_576_890_767, 3_628_273_133, 2_860_486_313, 5_463_458_053, 3_367_900_313),
)
"""Of the hash functions, in turn."""


@dataclass(frozen=True, kw_only=True)
class ByteHashSpec:
    """`lengths` of n-grams; `rows` of the table for each of them and each of the `functions`."""

    lengths: tuple[int, ...]
    rows: int
    functions: int

    @property
    def factors(self) -> list[list[int]]:
        """By hash: those of the byte and of the ones before it, the nearest first, as int64."""
        longest = max(self.lengths)
        return [
            [_wrapped(PRIMES[i % len(PRIMES)] ** (size - 1 - back)) for back in range(size)]
            + [0] * (longest - size)
            for i in range(self.functions)
            for size in self.lengths
        ]


class ByteHashes:
    """`into(x_TE, ids_T, before_TN)` -> x_TE with what its n-grams add. before_TN int64: the ids
    before each byte, the nearest first, 0 before the text; there may be more than are read."""

    def __init__(self, scope: Scope, spec: ByteHashSpec, width: int) -> None:
        self.longest = max(spec.lengths)
        self._scope, self._spec = scope, spec
        hashes = spec.functions * len(spec.lengths)
        self._table = TokenEmbedding(scope, hashes * spec.rows, width)
        self._factors_HN = torch.empty(0)
        scope.on_finish(self._finish)

    def into(
        self, x_TE: torch.Tensor, ids_T: torch.Tensor, before_TN: torch.Tensor
    ) -> torch.Tensor:
        """See the class."""
        ids_TN = torch.cat((ids_T[:, None], before_TN), dim=1)[:, : self.longest]
        for index, factors_N in enumerate(self._factors_HN):
            hash_T = (ids_TN * factors_N).sum(1) % self._spec.rows  # the product may overflow
            x_TE = x_TE + self._table.lookup(hash_T + index * self._spec.rows)
        return x_TE

    def _finish(self) -> None:
        factors = torch.tensor(self._spec.factors, dtype=torch.int64)
        self._factors_HN = factors.to(self._scope.device)


def _wrapped(number: int) -> int:
    """As 64 bits with a sign hold it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
