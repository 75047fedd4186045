"""What the runner may ask of a model. Everything else about a model is its own business."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.attention.kv_layer import KVLayer
from headrace.back.attention.plan import Batch


class CausalModel(Protocol):
    """A loaded decoder on this rank."""

    kv_layers: tuple[KVLayer, ...]
    logits_width: int

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs the decoder over T tokens; returns the normed hidden states [T, E] in the model's dtype."""
        ...

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, logits_width] in float32, gathered over ranks, soft-capped and scaled."""
        ...
