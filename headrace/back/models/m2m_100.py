"""M2M-100 (Fan et al. 2020) and NLLB-200 without experts: norms before each branch, sines and
cosines as positions, which begin behind the padding's."""

from __future__ import annotations

from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """M2M100ForConditionalGeneration."""
    first = config.int("pad_token_id", 1, ge=0) + 1
    form = BartForm(pre=True, embedding_norm=False, logits_bias=False)
    positions = SinusoidalPositions(first=first, spread=1)
    return build_bart(scope, config, form, positions=positions)
