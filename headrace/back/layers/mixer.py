"""The first branch of a decoder layer, which mixes the tokens of a row: attention over the KV cache
or a recurrent layer over its state, behind one face.

T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial

Handed = TypeVar("Handed")
"""What a mixer hands from its one half to its other: queries of attention; of recurrent layers what
the output projection reads; with the gates of either. A row a token."""


class MixerSpec(Protocol):
    """A mixer as data of its layer: AttentionSpec, LatentAttentionSpec, Mamba2Spec and others;
    `build` makes it on this rank."""

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> Mixer[Any]:
        """`scope` is the layer's. `cache`: the id of the mixer's first cache, the others follow
        it; of models with attention alone it is the layer's number. `norm` stands before it,
        `adds`: its result goes into the residual as it is."""
        ...


class Mixer(Protocol[Handed]):
    """What a decoder layer asks of its first branch, in two halves: behind the first the caches are
    written, so that the last layer goes on with the tokens alone whose hidden states are wanted.

    kv_forms   its caches; those of kind "state" hold what a row's tokens have left behind
    norms      whether the norm before is part of it: then x is what goes into that norm
    probed     whether a batch's probe sees its queries
    """

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]: ...

    @property
    def norms(self) -> bool: ...

    @property
    def probed(self) -> bool: ...

    def queries(self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None) -> Handed:
        """The first half; with `at_N` what is handed on is of these tokens alone."""
        ...

    def attend_into(
        self, handed: Handed, residual_TE: torch.Tensor, batch: Batch, /
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        ...
