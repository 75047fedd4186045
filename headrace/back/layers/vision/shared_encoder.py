"""An encoder whose inputs are shared out among the ranks of a tensor-parallel axis, each of which
holds all of its weights: every rank encodes some, and a sum over the axis gives the rows to all
(vLLM's `--mm-encoder-tp-mode data`).

N patches, M tokens, W the width of what the encoder gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headrace.back.layers.vision.encoder import Grid, MediaEncoder
from headrace.back.parallel.collectives import all_reduce
from headrace.back.parallel.mesh import Axis


class SharedEncoder:
    """`MediaEncoder` around one. All ranks ask for the same inputs at the same time."""

    def __init__(self, encoder: MediaEncoder, axis: Axis) -> None:
        self._encoder, self._axis = encoder, axis
        self.forms, self.width = encoder.forms, encoder.width
        self.layers, self.dtype, self.rope = encoder.layers, encoder.dtype, encoder.rope

    @property
    def inner(self) -> MediaEncoder:
        """See WrappedEncoder: what each rank does with one input alone."""
        return self._encoder

    def around(self, wrap: Callable[[MediaEncoder], MediaEncoder]) -> SharedEncoder:
        """The same, of what `wrap` makes of each rank's encoder."""
        return SharedEncoder(wrap(self._encoder), self._axis)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder. One input alone is encoded by every rank: nothing is sent."""
        if len(grids) == 1:
            return self._encoder.encode(kind, rows_NB, grids)
        form = next(form for form in self.forms if form.kind == kind)
        sizes = [t * h * w for t, h, w in grids]
        counts = [form.num_rows(grid) for grid in grids]
        learned = form.packing.num_learned if form.packing is not None else 0
        mine = shares(sizes, self._axis.size)[self._axis.rank]
        width = self.width * (1 + self.layers)
        y_MW = rows_NB.new_zeros((sum(counts) + learned, width), dtype=self.dtype)
        if mine:
            inputs = rows_NB.split(sizes)
            own = self._encoder.encode(
                kind, torch.cat([inputs[i] for i in mine]), [grids[i] for i in mine]
            )
            places = y_MW.split([*counts, learned])
            targets = [places[i] for i in mine]
            if learned and 0 in mine:
                targets.append(places[-1])
            for target, part in zip(targets, own.split([len(one) for one in targets]), strict=True):
                target.copy_(part)
        return all_reduce(y_MW, self._axis)


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which inputs each rank encodes: the largest first, each to the rank with the fewest patches
    so far."""
    loads = [0] * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[index]
        owned[rank].append(index)
    return [sorted(one) for one in owned]
