"""Dummy weights (`--load-format dummy`): seeded, independent of how the model is split, and about
as fast as memory.

Element i of a tensor is element (start + i) mod P of one pool of P normal numbers, where `start`
follows from the seed and the tensor's checkpoint name. P is a prime, so rows of any width are
shifted against each other. A rank computes its slices from the same numbers, hence TP2's slices are
TP1's (bit for bit), and filling is copying: 0.6 billion parameters in well under a second on one
core, where drawing each number would take ten times as long.
"""

from __future__ import annotations

import hashlib

import torch

from headrace.back.models.weights import Copy, Param, copies

POOL_SIZE = 1_048_573
"""The largest prime below 2^20: the pool stays in the second-level cache (2 MB in bfloat16)."""
CHUNK_ELEMENTS = 1 << 20


class DummyWeights:
    """Fills parameters from the pool of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._pools: dict[tuple[torch.dtype, torch.device, float], torch.Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(POOL_SIZE, generator=generator)

    def fill(self, param: Param) -> None:
        """Writes this rank's part of `param` as its `init` says."""
        if param.init == "ones":
            param.present().fill_(1)
        elif param.init == "zeros":
            param.present().zero_()
        else:
            assert param.init == "normal", param
            for copy in copies(param):
                self._fill(param.target(copy), copy, param.init_scale)

    def _fill(self, target: torch.Tensor, copy: Copy, scale: float) -> None:
        pool = self._pool(target.dtype, target.device, scale)
        columns = copy.shape[-1] if len(copy.shape) > 1 else 1
        cut = copy.source[-1] if len(copy.shape) > 1 else slice(0, 1)
        begin = self._start(copy.name) + _first_row(copy) * columns
        if target.is_contiguous() and cut == slice(0, columns):
            _copy_ring(target.view(-1), pool, begin)
            return
        rows = target.view(-1, target.shape[-1])
        step = max(1, CHUNK_ELEMENTS // columns)
        buffer = torch.empty((step, columns), dtype=target.dtype, device=target.device)
        for row in range(0, len(rows), step):
            part = rows[row : row + step]
            whole = buffer[: len(part)]
            _copy_ring(whole.view(-1), pool, begin + row * columns)
            part.copy_(whole[:, cut])

    def _start(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % POOL_SIZE

    def _pool(self, dtype: torch.dtype, device: torch.device, scale: float) -> torch.Tensor:
        """The pool where it is copied from: on a device it lies in its cache as well."""
        key = (dtype, device, scale)
        if key not in self._pools:
            self._pools[key] = (self._normal * scale).to(dtype).to(device)
        return self._pools[key]


def _first_row(copy: Copy) -> int:
    """Index of the copy's first row once all dimensions but the last are flattened."""
    if len(copy.shape) <= 1:
        return copy.source[0].start if copy.shape else 0
    inner = copy.source[1:-1]
    whole = all(part == slice(0, size) for part, size in zip(inner, copy.shape[1:-1], strict=True))
    assert whole, f"{copy.name}: only the first and last dimension can be split, not {copy.source}"
    rows = 1
    for size in copy.shape[1:-1]:
        rows *= size
    return copy.source[0].start * rows


def _copy_ring(target: torch.Tensor, pool: torch.Tensor, begin: int) -> None:
    """Fills a flat tensor from the pool's element `begin` on, around its end as often as needed."""
    done, begin = 0, begin % POOL_SIZE
    while done < len(target):
        count = min(POOL_SIZE - begin, len(target) - done)
        target[done : done + count].copy_(pool[begin : begin + count])
        done, begin = done + count, 0
