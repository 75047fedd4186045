"""The dense modules behind the encoder: after the pooling (sentence-transformers), or on every
token (ColBERT).

They are small and run in float32 on the device, behind the pooled vectors of a step. N vectors, I
inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

ACTIVATIONS = {
    "identity": torch.nn.Identity(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}


@dataclass(frozen=True, kw_only=True)
class DenseModule:
    """x_NI -> activation(x W^T + b), [N, O]; all float32."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    activation: str

    def project(self, x_NI: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y_NO = functional.linear(x_NI, self.weight_OI, self.bias_O)
        y: torch.Tensor = ACTIVATIONS[self.activation](y_NO)
        return y


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Modules that follow each other, by what they are applied to: `pooled` vectors of whole texts,
    the vectors of `tokens`, `every` one, or the tokens whose `weights` are asked for."""

    pooled: tuple[DenseModule, ...] = ()
    tokens: tuple[DenseModule, ...] = ()
    every: tuple[DenseModule, ...] = ()
    weights: tuple[DenseModule, ...] = ()

    def of(self, *, tokens: bool) -> tuple[DenseModule, ...]:
        """Those of vectors of tokens, or of pooled ones."""
        return self.every or (self.tokens if tokens else self.pooled)


def projected(modules: Sequence[DenseModule], x_NI: torch.Tensor) -> torch.Tensor:
    """The vectors behind all modules, one after the other."""
    for module in modules:
        x_NI = module.project(x_NI)
    return x_NI
