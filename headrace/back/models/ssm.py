"""What families with recurrent layers share: the keys of config.json."""

from __future__ import annotations

import math

from headrace.back.models.blocks import EPS, DecoderSizes
from headrace.base.config.hf import ConfigReader

ANY_STEP = (0.0, math.inf)
"""The limits of a time step where the config states none."""


def read_recurrent_sizes(config: ConfigReader, *, tied: bool, eps: float = 1e-5) -> DecoderSizes:
    """The sizes of a model without attention; `tied`, `eps`: the family's defaults."""
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=config.int("hidden_size", aliases=("d_model",), ge=1),
        inner=0,
        layers=config.int("num_hidden_layers", aliases=("n_layer",), ge=1),
        heads=0,
        kv_heads=0,
        head_dim=0,
        eps=config.float("rms_norm_eps", eps, aliases=EPS, ge=0.0),
        activation="silu",
        tied=config.bool("tie_word_embeddings", tied),
    )
