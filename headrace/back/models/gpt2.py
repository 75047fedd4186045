"""GPT-2: learned positions, layer norms, weights stored as [inputs, outputs], query, key and value
in one tensor."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.positions import LearnedPositions
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

PLACEMENT = NormPlacement(before_attention="ln_1", before_mlp="ln_2")
NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="h", norm="ln_f")
MASKS = r".*\.attn\.(masked_)?bias"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GPT2LMHeadModel."""
    sizes = read_sizes(
        config,
        activation=("activation_function",),
        gated=False,
        default_activation="gelu_new",
        eps=1e-5,
        tied=True,
        kv_heads=config.int("n_head", aliases=("num_attention_heads",), ge=1),
    )
    if config.bool("add_cross_attention", False):
        raise config.wrong("add_cross_attention", "false")
    turned = not config.bool("outputs_first", False)  # GGUF files have linear layers as others
    names = AttentionNames(module="attn", merged="c_attn", out="c_proj", transposed=turned)
    by_layer = config.bool("scale_attn_by_inverse_layer_idx", False)
    plain = plain_attention(sizes)
    scale = sizes.head_dim**-0.5 if config.bool("scale_attn_weights", True) else 1.0
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **{**plain, "scale": scale / (index + 1) if by_layer else scale},
                rope=None,
                qkv_bias=True,
                out_bias=True,
                names=names,
            ),
            placement=PLACEMENT,
            feed_forward=PlainMLPSpec(up="c_fc", down="c_proj", bias=True, transposed=turned),
        )
        for index in range(sizes.layers)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=LAYER,
            positions=LearnedPositions(
                name="wpe",
                rows=config.int("n_positions", 1024, aliases=("max_position_embeddings",), ge=1),
            ),
            names=NAMES,
            ignored=(MASKS,),
        ),
    )
