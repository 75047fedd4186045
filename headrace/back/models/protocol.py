"""What the runner and the loader may ask of a model. Everything else about a model is its own
business."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.logits import TopOf
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.weights import WeightPlan
from headrace.base.config.resolved import Decision


class CausalModel(Protocol):
    """A loaded model on this rank: a decoder, or an encoder whose texts are only pooled.

    `generates`: it has a language-model head. `state` names a row of `runner/states`.
    `host_pairs`: steps whose prompts have so many pairs of a query and a position are to be
    launched by themselves, with their sizes on the host; None: none are.
    `adapters`: the slots of its linear layers' adapters; None: they take none.
    `attention_heads`: query heads of each layer, where a batch's probe sees them; 0: it does not.
    `media`: what makes rows of images and video in place of embeddings; None: text is all it takes.
    `encoder_tokens`: the most token ids that the encoder of an encoder-decoder reads, else 0.
    """

    kv_forms: tuple[CacheForm, ...]
    logits_width: int
    generates: bool
    attention_heads: int
    encoder_tokens: int
    state: str
    host_kernels: tuple[str, ...]
    host_pairs: int | None
    adapters: AdapterSlots | None
    media: MediaEncoder | None

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs the decoder over T tokens; returns the normed hidden states [T, E] in the model's
        dtype, of a batch with a `rest` those of logits_at_N alone, [N, E]."""
        ...

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width] in float32, gathered over ranks, soft-capped and
        scaled as the family does."""
        ...

    @property
    def argmax(self) -> TopOf | None:
        """hidden_NE -> the greedy token of each row and its logit, without writing whole rows of
        logits; None if the model cannot."""
        ...

    @property
    def top_candidates(self) -> TopOf | None:
        """hidden_NE -> the best TOPS (op linear_top) tokens of each row and their logits,
        likewise."""
        ...

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Class logits [N, labels] in float32 of pooled hidden states; only where the model has
        such a head."""
        ...


class Loadable(Protocol):
    """What has weights that are still to come. `decisions` are complete after `finish_load`."""

    weights: WeightPlan
    decisions: tuple[Decision, ...]

    def finish_load(self) -> None:
        """Packs the loaded weights; before it nothing can run, after it nothing can be loaded."""
        ...


class LoadableModel(CausalModel, Loadable, Protocol):
    """A model whose weights are still to come."""
