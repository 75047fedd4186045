"""StarCoder2: layer norms, an MLP without a gate, biases, one sliding window or none."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Starcoder2ForCausalLM."""
    sizes = read_sizes(
        config, gated=False, default_activation="gelu_pytorch_tanh", eps=1e-5, tied=True
    )
    bias = config.bool("use_bias", True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            window=config.int("sliding_window", None, ge=1),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=PlainMLPSpec(up="c_fc", down="c_proj", bias=bias),
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, norm=LAYER))
