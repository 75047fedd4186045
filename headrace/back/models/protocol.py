"""What the runner and the loader may ask of a model. Everything else about a model is its own
business."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.attention.kv_layer import KVLayer
from headrace.back.attention.plan import Batch
from headrace.back.models.weights import WeightPlan
from headrace.base.config.resolved import Decision


class CausalModel(Protocol):
    """A loaded decoder on this rank."""

    kv_layers: tuple[KVLayer, ...]
    logits_width: int

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs the decoder over T tokens; returns the normed hidden states [T, E] in the model's
        dtype."""
        ...

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width] in float32, gathered over ranks, soft-capped and
        scaled as the family does."""
        ...


class LoadableModel(CausalModel, Protocol):
    """A decoder whose weights are still to come. `decisions` are complete after `finish_load`."""

    weights: WeightPlan
    decisions: tuple[Decision, ...]

    def finish_load(self) -> None:
        """Packs the loaded weights; before it the model cannot run, after it nothing can be
        loaded."""
        ...
