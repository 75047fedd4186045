"""Places of positions by convolutions over them: one wide one (wav2vec 2.0, Baevski et al. 2020),
or several with norms between them (data2vec, Baevski et al. 2022). S positions, E width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.back.layers.scope import Scope

EPS = 1e-5
Activation = Callable[[torch.Tensor], torch.Tensor]


class WavePlaces(Protocol):
    """What a tower asks of its places."""

    def of(self, x_SE: torch.Tensor) -> torch.Tensor:
        """What is added to the positions of an input."""
        ...


class WavePlacesSpec(Protocol):
    """Places as data of their tower. squeeze: positions that become one."""

    @property
    def squeeze(self) -> int:
        """See the class."""
        ...

    def build(self, scope: Scope) -> WavePlaces:
        """`scope` is their own."""
        ...


@dataclass(frozen=True, kw_only=True)
class WidePlacesSpec:
    """One convolution in groups; `squeeze`: its stride."""

    width: int
    taps: int
    groups: int
    activation: Activation
    squeeze: int = 1

    def build(self, scope: Scope) -> WavePlaces:
        """See WavePlacesSpec."""
        return WidePlaces(scope, self)


@dataclass(frozen=True, kw_only=True)
class StackedPlacesSpec:
    """So many `layers` of convolutions in groups, each with a norm without weights."""

    width: int
    taps: int
    groups: int
    activation: Activation
    layers: int
    squeeze: int = 1

    def build(self, scope: Scope) -> WavePlaces:
        """See WavePlacesSpec."""
        return StackedPlaces(scope, self)


class WidePlaces:
    """x_SE -> y_SE: one convolution in groups, whose weight has a length of its own for each tap
    (Salimans and Kingma 2016)."""

    def __init__(self, scope: Scope, spec: WidePlacesSpec) -> None:
        self._spec, width, taps = spec, spec.width, spec.taps
        scope = scope / "conv"
        named = "parametrizations.weight.original"
        self._length = scope.param(f"{named}0", (1, 1, taps))
        self._direction = scope.param(f"{named}1", (width, width // spec.groups, taps))
        self._bias = scope.param("bias", (width,))
        self._weight, self._bias_E = torch.empty(0), torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        direction = self._direction.take()
        length = direction.float().square().sum((0, 1), keepdim=True).sqrt()
        scaled = direction.float() * (self._length.take().float() / length)
        self._weight, self._bias_E = scaled.to(direction.dtype), self._bias.take()

    def of(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        spec = self._spec
        y_AES = F.conv1d(
            x_SE.T[None],
            self._weight,
            self._bias_E,
            stride=spec.squeeze,
            padding=spec.taps // 2,
            groups=spec.groups,
        )
        count = y_AES.shape[2] - (spec.taps + 1) % 2
        return spec.activation(y_AES[0, :, :count].T)


class StackedPlaces:
    """x_SE -> y_SE."""

    def __init__(self, scope: Scope, spec: StackedPlacesSpec) -> None:
        self._spec, width = spec, spec.width
        shape = (width, width // spec.groups, spec.taps)
        self._params = [
            (
                scope.param(f"layers.{index}.conv.weight", shape),
                scope.param(f"layers.{index}.conv.bias", (width,)),
            )
            for index in range(spec.layers)
        ]
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._params]

    def of(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        spec, y_AES = self._spec, x_SE.T[None]
        for weight, bias in self._weights:
            y_AES = F.conv1d(y_AES, weight, bias, padding=spec.taps // 2, groups=spec.groups)
            y_ASE = y_AES[:, :, : x_SE.shape[0]].transpose(1, 2)
            y_AES = spec.activation(F.layer_norm(y_ASE, (spec.width,), eps=EPS).transpose(1, 2))
        return y_AES[0].T
