"""Talkie (2026): norms without weights, learned factors of branches, heads and logits, rotations
turned the other way, and the tokens' normed embeddings, which every layer adds again (names and
keys of the published checkpoints)."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.layers.attention import AttentionNames, AttentionSpec, QKNorm
from headrace.back.layers.gains import (
    BranchGainSpec,
    EmbeddingSkipsSpec,
    GainedNormSpec,
    HeadGainSpec,
    SkipTailSpec,
)
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import RMS_NO_WEIGHT, NormPlacement
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

NAMES = DecoderNames(embedding="embed", embedding_norm="embed_norm", layers="blocks")
ATTENTION = AttentionNames(
    module="attn", query="attn_query", key="attn_key", value="attn_value", out="attn_resid"
)
MLP = GatedMLPSpec(gate="mlp_gate", up="mlp_linear", down="mlp_resid")
GAIN = BranchGainSpec("a_g")
PLACEMENT = NormPlacement(
    before_attention="attn_norm",
    after_attention="attn_gain",
    before_mlp="mlp_norm",
    after_mlp="mlp_gain",
)
RENAMED = (
    (r"^(embed|blocks)\.", r"model.\1."),
    (r"^lm_head$", "lm_head.weight"),
    (r"^lm_head_gain\.w_g$", "model.norm.w_g"),
)
EPS = torch.finfo(torch.float32).eps
"""Of norms for which none is stated."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """TalkieForCausalLM."""
    sizes = read_sizes(config, eps=EPS)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, default_theta=1e6
    )
    if config.bool("turned_back", True):  # GGUF files have the signs in the weights
        rope = replace(rope, frequencies=tuple(-one for one in rope.frequencies))
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            qk_norm=QKNorm(norm=RMS_NO_WEIGHT, eps=sizes.eps, after_rope=True),
            query_scale=HeadGainSpec("head_gain.head_g"),
            names=ATTENTION,
        ),
        placement=PLACEMENT,
        feed_forward=MLP,
        norms={"attn_gain": GAIN, "mlp_gain": GAIN},
        tail=SkipTailSpec("embed_skip.a_g"),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=RMS_NO_WEIGHT,
            layer_inputs=EmbeddingSkipsSpec(),
            last_norm=GainedNormSpec("w_g"),
            logits_scale=config.float("logit_scale", 1.0),
            names=NAMES,
            renamed=RENAMED,
        ),
    )
