"""Jais (Sengupta et al. 2023): GPT-2's decoder with ALiBi, gated MLPs and multipliers on embeddings
and logits, weights stored as [inputs, outputs] (names and keys of the published checkpoints)."""

from __future__ import annotations

from headrace.back.layers.alibi import LARGEST, alibi_slopes
from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.families import HEADS, WIDTH
from headrace.back.models.gpt2 import NAMES, PLACEMENT
from headrace.base.config.hf import ConfigReader

IGNORED = (r".*\.attn\.(masked_)?bias", r"transformer\.relative_pe\..*")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """JAISLMHeadModel."""
    config.choice("activation_function", ("swiglu",), "gelu")
    config.choice("position_embedding_type", ("alibi",), "learned")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    if "alibi_scaling" in config:
        raise config.wrong("alibi_scaling", "null: scaled slopes are not built")
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    inner = 4 * config.int("hidden_size", aliases=WIDTH, ge=1)
    sizes = read_sizes(config, kv_heads=heads, inner=inner, eps=1e-5, tied=True)
    turned = not config.bool("outputs_first", False)  # GGUF files have linear layers as others
    by_size = config.bool("scale_qk_dot_by_d", False, aliases=("mup_scale_qk_dot_by_d",))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes) | {"scale": sizes.head_dim ** (-1.0 if by_size else -0.5)},
            rope=None,
            slopes=alibi_slopes(heads, largest=config.float("alibi_bias_max", LARGEST, ge=0.0)),
            qkv_bias=True,
            out_bias=True,
            names=AttentionNames(module="attn", merged="c_attn", out="c_proj", transposed=turned),
        ),
        placement=PLACEMENT,
        feed_forward=GatedMLPSpec(
            gate="c_fc2", up="c_fc", down="c_proj", bias=True, transposed=turned
        ),
    )
    narrower = config.float("width_scale", None)
    if narrower is None:
        narrower = config.float("mup_output_alpha", 1.0) * config.float("mup_width_scale", 1.0)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            embedding_scale=config.float(
                "embeddings_scale", 1.0, aliases=("mup_embeddings_scale",)
            ),
            logits_scale=narrower,
            names=NAMES,
            ignored=IGNORED,
        ),
    )
