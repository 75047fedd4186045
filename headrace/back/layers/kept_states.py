"""A residual beside states of it that were kept before some layers, to be mixed into it before
others ("backbone skip connections": Upstage's Solar Pro, 2024).

T tokens, E hidden size, S 1 + slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class KeptStatesSpec:
    """The residual's streams: the residual, and `slots` kept states."""

    slots: int

    def build(self, scope: Scope, width: int) -> KeptStates:
        """See ResidualStreamsSpec."""
        return KeptStates(self.slots)


class KeptStates:
    """states_STE: the residual first. See ResidualStreams."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Nothing is kept yet."""
        states_STE = x_TE.new_zeros(1 + self._slots, *x_TE.shape)
        states_STE[0] = x_TE
        return states_STE

    def end(self, states_STE: torch.Tensor, /) -> torch.Tensor:
        """The residual."""
        return states_STE[0]


class StateChange(Protocol):
    """What happens to the states before a layer."""

    def apply(self, states_STE: torch.Tensor) -> None:
        """In place."""
        ...


class StateChangeSpec(Protocol):
    """The same as data of its layer."""

    def build(self, scope: Scope, width: int) -> StateChange | None:
        """`scope` is the layer's; None: nothing happens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Skips:
    """What happens before a layer: the slots that take the residual, and then those that are mixed
    into it, which they are `share` of."""

    kept: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    share: float = 0.0

    def build(self, scope: Scope, width: int) -> Skips | None:
        """See StateChangeSpec; there is nothing to load."""
        return self if self.kept or self.mixed else None

    def apply(self, states_STE: torch.Tensor) -> None:
        """In place."""
        residual_TE = states_STE[0]
        for slot in self.kept:
            states_STE[1 + slot] = residual_TE
        for slot in self.mixed:
            residual_TE.lerp_(states_STE[1 + slot], self.share)
