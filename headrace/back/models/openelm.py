"""OpenELM (Mehta et al. 2024): Llama's decoder whose layers differ in heads and inner sizes, with
norms of each head's queries and keys (names and keys of the published checkpoints)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import NormPlacement
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

NAMES = DecoderNames(prefix="transformer", embedding="token_embeddings")
ATTENTION = AttentionNames(module="attn", merged="qkv_proj", out="out_proj")
PLACEMENT = NormPlacement(before_attention="attn_norm", before_mlp="ffn_norm")
MLP = GatedMLPSpec(name="ffn", merged="proj_1", down="proj_2")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OpenELMForCausalLM, whose sizes stand under common keys besides
    (published_keys.py)."""
    config.choice("normalization_layer_name", ("rms_norm",), "rms_norm")
    if not config.bool("ffn_with_glu", True):
        raise config.wrong("ffn_with_glu", "true")
    width = config.int("hidden_size", ge=1)
    sizes = read_sizes(config, inner=width, tied=True, kv_heads=1)  # layers have their own
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    qk_norm = None
    if config.bool("normalize_qk_projections", True):
        qk_norm = QKNorm(eps=sizes.eps)
    heads = config.list("num_query_heads", of=int, length=sizes.layers)
    kv_heads = config.list("num_kv_heads", of=int, length=sizes.layers)
    wider = config.list("ffn_multipliers", of=float, length=sizes.layers)
    multiple = config.int("ffn_dim_divisor", 256, ge=1)
    if any(of < 1 or one < 1 or of % one for of, one in zip(heads, kv_heads, strict=True)):
        raise config.wrong("num_kv_heads", "divisors of num_query_heads")
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(replace(sizes, heads=of, kv_heads=one)),
                rope=rope,
                qk_norm=qk_norm,
                names=ATTENTION,
            ),
            placement=PLACEMENT,
            feed_forward=replace(MLP, inner=divisible(factor * width, multiple)),
        )
        for of, one, factor in zip(heads, kv_heads, wider, strict=True)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES))


def divisible(size: float, multiple: int) -> int:
    """The nearest multiple, at least one, and not a tenth below `size`."""
    near = max(multiple, int(size + multiple / 2) // multiple * multiple)
    return near if near >= 0.9 * size else near + multiple
