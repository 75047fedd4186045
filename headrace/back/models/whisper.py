"""Whisper (Radford et al. 2022): speech to text. Its encoder reads a log-mel spectrogram through
two convolutions; both stacks have norms before each branch and one behind, and keys have no
bias."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.layers.audio.tower import LinePair
from headrace.back.layers.positions import LearnedPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, bart_spec
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader

UNBIASED = "k_proj"
IGNORED = (r"proj_out\.weight",)


class WhisperSource:
    """spectrograms [B, bands, frames] of one size -> x_SE, two frames for each of `positions`."""

    def __init__(self, scope: Scope, *, bands: int, positions: int, width: int) -> None:
        self._dtype = scope.dtype
        self._reader = LinePair(table=positions).build(scope, bands, width)

    def read(self, spectrograms: torch.Tensor) -> torch.Tensor:
        """See EncoderSource."""
        frames_BNM = spectrograms.to(self._dtype).transpose(1, 2)
        lengths = [frames_BNM.shape[1]] * frames_BNM.shape[0]
        return self._reader.read(frames_BNM, lengths).flatten(0, 1)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """WhisperForConditionalGeneration."""
    scope = replace(scope, unbiased=UNBIASED)
    positions = config.int("max_source_positions", 1500, ge=1)
    scope = replace(scope, encoder_tokens=positions)
    table = LearnedPositions(
        name="embed_positions", rows=config.int("max_target_positions", 448, ge=1)
    )
    form = BartForm(pre=True, embedding_norm=False, logits_bias=False)
    bands = config.int("num_mel_bins", 80, ge=1)
    spec = replace(
        bart_spec(scope, config, form, positions=table),
        shared="decoder.embed_tokens",
        source=lambda at, width: WhisperSource(at, bands=bands, positions=positions, width=width),
        ignored=IGNORED,
    )
    return EncoderDecoder(scope, spec)
