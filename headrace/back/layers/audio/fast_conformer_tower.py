"""A conformer as the tower of a model that hears: its positions, through a projector, are the
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.audio.fast_conformer import ConformerSpec
from headrace.back.layers.audio.transducer import Transducer, TransducerSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.plain_tower import ProjectorSpec
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm, SoundSteps

MOST_FRAMES = 60_000
"""Ten minutes."""


class FastConformerTower:
    """`MediaEncoder`. `whole` is the scope of the checkpoint, `scope` the tower's. `ghosts`: see
    FastConformer. `projector`: None: positions are tokens as they are. `transducer`: what they say
    is the tokens' row. `conformer`: of the tower, once it is built."""

    rope = None
    layers = 0

    def __init__(
        self,
        whole: Scope,
        scope: Scope,
        spec: ConformerSpec,
        projector: ProjectorSpec | None,
        *,
        ghosts: int = 0,
        transducer: TransducerSpec | None = None,
    ) -> None:
        whole, scope = (
            replace(one, mesh=Mesh(), online=None, adapters=None) for one in (whole, scope)
        )
        self._ghosts = ghosts
        self.conformer = spec.build(scope)
        self._projector = None if projector is None else projector.build(whole)
        self._transducer = None if transducer is None else Transducer(whole, transducer)
        self.width = spec.width if projector is None else projector.outputs
        if transducer is not None:
            self.width = transducer.row_width
        self.dtype = scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * spec.bands,
                max_rows=MOST_FRAMES,
                max_t=1,
                sound=SoundSteps(strides=spec.strides),
            ),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        frames_NM = rows_NB.view(torch.float32).to(self.dtype)
        inputs = frames_NM.split([t * h * w for t, h, w in grids])
        each = [self.conformer.forward(one, ghosts=self._ghosts) for one in inputs]
        if self._transducer is not None:
            return torch.cat([self._transducer.forward(one) for one in each])
        x_SE = torch.cat(each)
        return x_SE if self._projector is None else self._projector.merge(x_SE)
