"""GPT-J: both branches side by side behind one layer norm, pairs of neighbours rotated in the first
dimensions of each head (Wang and Komatsuzaki 2021)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER, NormPlacement
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
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="h", norm="ln_f")
ATTENTION = AttentionNames(module="attn", out="out_proj")
PLACEMENT = NormPlacement(before_attention="ln_1", parallel=True)
MASKS = r".*\.attn\.(masked_bias|bias|embed_positions)"


def build(scope: Scope, config: ConfigReader, *, attention: AttentionNames = ATTENTION) -> Decoder:
    """GPTJForCausalLM. `attention`: where the tensors of an attention lie."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        kv_heads=heads,
        activation=("activation_function",),
        gated=False,
        default_activation="gelu_new",
        eps=1e-5,
    )
    rotary = config.int("rotary_dim", sizes.head_dim, ge=2, le=sizes.head_dim)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_share=rotary / sizes.head_dim,
        layout="pairs",
    )
    layer = LayerSpec(
        mixer=AttentionSpec(**plain_attention(sizes), rope=rope, names=attention),
        placement=PLACEMENT,
        feed_forward=PlainMLPSpec(up="fc_in", down="fc_out", bias=True),
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            logits_bias=True,
            names=NAMES,
            ignored=(MASKS,),
        ),
    )
