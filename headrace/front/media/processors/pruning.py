"""Efficient video sampling: of a video's windows those are left out whose pixels are nearest to the
same window of the step before (Bagrov et al. 2025).

They are chosen by pixels, before anything is encoded: so the tokens of a prompt and their positions
are known without a run. All of the first step stays, and one window of each input.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.base.config.media import ProcessorSettings
from headrace.base.wire.media import MediaCut
from headrace.front.media.processing import TowerInput


def with_kept(inputs: Sequence[TowerInput], settings: ProcessorSettings) -> tuple[TowerInput, ...]:
    """The inputs of one video, all steps of one size, without the share that is pruned."""
    if not settings.pruned:
        return tuple(inputs)
    window = settings.merge**2
    steps = [
        step.reshape(len(step) // window, -1)
        for one in inputs
        for step in one.rows.reshape(one.grid[0], -1, one.rows.shape[1])
    ]
    changes = np.stack([np.full(len(steps[0]), np.inf), *map(_change, steps[1:], steps)])
    counts = [one.grid[0] for one in inputs]
    firsts = np.cumsum([0, *counts[:-1]])
    for first in firsts[1:]:  # one window of each input
        changes[first, changes[first].argmax()] = np.inf
    total, least = changes.size, int(np.isinf(changes).sum())
    kept = max(least, int(total * (1 - settings.pruned)))
    is_kept = np.zeros(total, bool)
    is_kept[np.argsort(-changes, axis=None, kind="stable")[:kept]] = True
    parts = np.split(is_kept.reshape(changes.shape), firsts[1:])
    return tuple(_pruned(one, part) for one, part in zip(inputs, parts, strict=True))


def _change(step: np.ndarray, before: np.ndarray) -> np.ndarray:
    """float64 [windows]: the mean difference of a window's pixels."""
    higher, lower = np.maximum(step, before), np.minimum(step, before)
    change: np.ndarray = (higher - lower).mean(axis=1)
    return change


def _pruned(one: TowerInput, is_kept: np.ndarray) -> TowerInput:
    cut = MediaCut(kept=np.packbits(is_kept, axis=None).tobytes())
    return msgspec.structs.replace(one, cut=cut, num_tokens=cut.num_kept)
