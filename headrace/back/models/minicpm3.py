"""MiniCPM3: a dense decoder with multi-head latent attention, and multipliers on embeddings,
branches and logits."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniCPM3ForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    depth = config.float("scale_depth", None)
    layer = LayerSpec(
        mixer=read_latent_attention(scope, config, sizes),
        branch_scale=1.0 if depth is None else depth / sizes.layers**0.5,
    )
    base = config.int("dim_model_base", None, ge=1)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            embedding_scale=config.float("scale_emb", 12.0),
            logits_scale=1.0 if base is None else base / sizes.width,
        ),
    )
