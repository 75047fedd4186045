"""What a built model wants from a checkpoint: the seam between model families and the loader.

A family states each parameter once (`back/parallel/param.py`): its global shape, the checkpoint
tensors it is put together from, and how it is split over ranks. `copies` turns that into plain
rectangles to copy; the loader needs no more. Names are those of the checkpoint as published
(transformers' state dict names for safetensors).

    model = build_model(spec, mesh=mesh, device=device, block_tokens=16)
    for param in model.weights.params:
        for copy in copies(param):
            param.target(copy).copy_(checkpoint[copy.name][copy.source] * copy.scale)
    model.finish_load()               # layers pack their weights and drop the plain ones
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.back.parallel.param import Copy, Param, WeightPiece, copies

__all__ = ["Copy", "Param", "WeightPiece", "WeightPlan", "copies", "names_within"]


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """All parameters of a model, and the checkpoint names that may be there without being wanted.

    `ignored` are regular expressions that match whole names (rotary inv_freq buffers, a tied
    lm_head ...). `prefix`: below it lies all but the head, unless the checkpoint is bare.
    `renamed`: (pattern, replacement) for names that a checkpoint may have instead of these.
    `layers`: the parameters of each layer that may lie in host memory; empty: none may.
    """

    params: tuple[Param, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    layers: tuple[tuple[Param, ...], ...] = ()


def names_within(path: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns of a text model's own names, which lie below `path` in a checkpoint of several
    parts; the others' names may be anything."""
    if not path:
        return patterns
    inside = re.escape(f"{path}.")
    return (*(inside + pattern for pattern in patterns), f"(?!{inside}).*")
