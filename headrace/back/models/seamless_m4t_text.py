"""SeamlessM4T 1 and 2 as they translate text: M2M-100 with other names (Barrault et al. 2023)."""

from __future__ import annotations

from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.seamless_m4t import CROSS, MLP, NORMS
from headrace.base.config.hf import ConfigReader

UNREAD = (
    r"(?:speech_encoder|t2u_model|vocoder)\..*",
    r"text_(?:encoder|decoder)\.embed_tokens\.weight",
)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """SeamlessM4TForTextToText, SeamlessM4Tv2ForTextToText."""
    own = {
        "d_model": config.int("hidden_size", 1024, ge=1),
        "scale_embedding": config.bool("scale_embedding", True),
        "activation_function": config.raw.get("activation_function", "relu"),
    }
    form = BartForm(
        pre=True,
        embedding_norm=False,
        logits_bias=False,
        ignored=UNREAD,
        prefix="",
        feed_forward=lambda half, layer: MLP,
        cross=CROSS[0],
        norms=NORMS,
        stacks=("text_encoder", "text_decoder"),
    )
    first = config.int("pad_token_id", 0, ge=0) + 1
    return build_bart(
        scope,
        ConfigReader({**config.raw, **own}, config.where),
        form,
        positions=SinusoidalPositions(first=first, spread=1),
    )
