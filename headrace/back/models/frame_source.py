"""What turns frames of sounds into what an encoder-decoder reads: a conformer, or what else its
tower has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.audio.fast_conformer import Conformer, ConformerSpec
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope
from headrace.back.parallel.mesh import Mesh


class FrameSource:
    """See SoundSource: frames through a conformer, each sound by itself; `projected`: the scope of
    a linear layer behind it."""

    def __init__(
        self, scope: Scope, spec: ConformerSpec, width: int, projected: Scope | None
    ) -> None:
        scope = replace(scope, mesh=Mesh(), online=None)
        self._bands, self._dtype = spec.bands, scope.dtype
        self._conformer: Conformer = spec.build(scope)
        self._out = None
        if projected is not None:
            projected = replace(projected, mesh=Mesh(), online=None)
            self._out = WholeLinear(projected, spec.width, width, bias=True)

    def read(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """See SoundSource."""
        frames = (one.view(-1, self._bands).to(self._dtype) for one in sounds)
        x_SE = torch.cat([self._conformer.forward(one) for one in frames])
        return x_SE if self._out is None else self._out.project(x_SE)
