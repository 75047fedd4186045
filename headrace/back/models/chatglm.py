"""ChatGLM 2 and 3, GLM-4-9B, as published: GLM's decoder under names of its own, query, key and
value in one tensor (Team GLM 2024; names and keys of the published checkpoints)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import LAYER, RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ChatGLMModel, ChatGLMForConditionalGeneration, whose sizes stand under common keys besides
    (published_keys.py)."""
    if "vision_config" in config:
        raise config.wrong("vision_config", "absent: with images in this layout it is not built")
    if "pre_seq_len" in config:
        raise config.wrong("pre_seq_len", "null: tuned prefixes are not built")
    sizes = read_sizes(config, eps=1e-5)
    bias = config.bool("add_bias_linear", False)
    names = AttentionNames(
        module="self_attention",
        merged="query_key_value",
        by_group=not config.bool("multi_query_attention", False),
        out="dense",
    )
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_share=0.5,
        layout="pairs" if config.bool("original_rope", True) else "half",
    )
    normed = config.bool("apply_residual_connection_post_layernorm", False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            qkv_bias=bias or config.bool("attention_bias", False),
            out_bias=bias,
            names=names,
        ),
        feed_forward=GatedMLPSpec(merged="dense_h_to_4h", down="dense_4h_to_h", bias=bias),
        normed_residual=(1.0, 1.0) if normed else None,
    )
    last = "encoder.final_layernorm" if config.bool("post_layer_norm", True) else None
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=RMS if config.bool("rmsnorm", True) else LAYER,
            names=DecoderNames(
                prefix="transformer",
                embedding="embedding.word_embeddings",
                layers="encoder.layers",
                norm=last,
                head="transformer.output_layer",
            ),
            ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
        ),
    )
