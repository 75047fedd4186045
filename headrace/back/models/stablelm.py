"""StableLM 2 and StableLM-3B: Llama's decoder with layer norms and a quarter of each head rotated;
some have a norm for each head, or both branches side by side."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.norm import LAYER, PARALLEL, PRE
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """StableLmForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    qk_norm = None
    if config.bool("qk_layernorm", False):
        names = ("q_layernorm", "k_layernorm")
        qk_norm = QKNorm(over="heads", eps=sizes.eps, names=names, listed="norms")
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(
                config,
                head_dim=sizes.head_dim,
                max_positions=scope.max_positions,
                default_share=0.25,
            ),
            qkv_bias=config.bool("use_qkv_bias", False),
            qk_norm=qk_norm,
        ),
        placement=PARALLEL if config.bool("use_parallel_residual", False) else PRE,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER))
