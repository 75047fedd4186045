"""The dense modules behind the encoder: after the pooling (sentence-transformers), or on every
token (ColBERT).

They are small and run in float32 on the device, behind the pooled vectors of a step. N vectors, I
inputs, O outputs.
"""

from __future__ import annotations

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
    """All modules one after the other. `per_token`: they belong to every token's vector, not only
    to pooled ones."""

    modules: tuple[DenseModule, ...]
    per_token: bool

    def project(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Pooled vectors [N, I] as the checkpoint's own."""
        for module in self.modules:
            x_NI = module.project(x_NI)
        return x_NI
