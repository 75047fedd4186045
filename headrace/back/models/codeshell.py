"""CodeShell (Xie et al. 2024): GPT-2's layers with rotations and grouped queries, weights stored as
[outputs, inputs] (names and keys of the published checkpoint)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.gpt2 import MASKS, NAMES, PLACEMENT
from headrace.base.config.hf import ConfigReader

ATTENTION = AttentionNames(module="attn", merged="c_attn", out="c_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """CodeShellForCausalLM."""
    config.choice("position_embedding_type", ("rope",), "rope")
    if not config.bool("group_query_attention", True):
        raise config.wrong("group_query_attention", "true")
    sizes = read_sizes(
        config,
        activation=("activation_function",),
        gated=False,
        default_activation="gelu_pytorch_tanh",
        eps=1e-5,
    )
    plain = plain_attention(sizes)
    if not config.bool("scale_attn_weights", True):
        plain = {**plain, "scale": 1.0}
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain,
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=True,
            out_bias=True,
            names=ATTENTION,
        ),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(up="c_fc", down="c_proj", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            names=NAMES,
            ignored=(MASKS,),
        ),
    )
