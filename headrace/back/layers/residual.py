"""What a layer's branches leave to be added to the residual, and its addition.

T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.layers.gains import BranchGain, GainedNorm
from headrace.back.layers.gated_block_norm import GatedBlockNorm
from headrace.back.layers.head_layer import HeadLayer
from headrace.back.layers.norm import LayerNorm, RMSNorm
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial

Branch = torch.Tensor | Partial | None
"""What a layer leaves to be added to the residual: nothing, a tensor, or this rank's share of a
sum."""
BlockNorm = RMSNorm | LayerNorm | GatedBlockNorm | HeadLayer | BranchGain | GainedNorm


class BlockNormSpec(Protocol):
    """A kind of norm of a layer: NormSpec and others."""

    def build(self, scope: Scope, width: int, *, eps: float) -> BlockNorm:
        """The norm whose tensors lie below `scope`."""
        ...


class ResidualStreamsSpec(Protocol):
    """A residual of several streams as data of its decoder."""

    def build(self, scope: Scope, width: int) -> ResidualStreams:
        """`scope` is that of the embedding."""
        ...


class ResidualStreams(Protocol):
    """A residual of S streams, [S, T, E] or [T, S, E] as the decoder's layers keep it."""

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The streams of the tokens' embeddings."""
        ...

    def end(self, streams: torch.Tensor, /) -> torch.Tensor:
        """x_TE behind the last layer."""
        ...


def sum_branches(one_TE: Branch, other_TE: Branch) -> Branch:
    """Two branches as one; the ranks' shares of both are summed together."""
    if one_TE is None or other_TE is None:
        return other_TE if one_TE is None else one_TE
    if isinstance(one_TE, Partial) and isinstance(other_TE, Partial):
        return Partial(one_TE.share + other_TE.share, one_TE.axis)
    first_TE, second_TE = (
        branch_TE.total() if isinstance(branch_TE, Partial) else branch_TE
        for branch_TE in (one_TE, other_TE)
    )
    return first_TE + second_TE


def total(branch_TE: Branch) -> torch.Tensor | None:
    """The branch, with the shares of all ranks."""
    return branch_TE.total() if isinstance(branch_TE, Partial) else branch_TE


def add_norm(norm: BlockNorm | None, branch_TE: Branch, residual_TE: torch.Tensor) -> torch.Tensor:
    """Adds a branch to the residual, in place, and norms that, if there is a norm."""
    if branch_TE is None:
        return residual_TE if norm is None else norm.norm(residual_TE)
    if isinstance(branch_TE, Partial):
        if norm is not None:
            return norm.sum_norm(branch_TE, residual_TE)
        branch_TE = branch_TE.total()
    if norm is None:
        return residual_TE.add_(branch_TE)
    return norm.add_norm(branch_TE, residual_TE)
