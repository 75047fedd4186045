"""ModernBERT's decoders (Ettin, Weller et al. 2025): layer norms, two of three layers in a window
with a rotation of their own, gated MLPs, a layer before the output head."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.head_layer import HeadLayerSpec
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import LAYER, LAYER_NO_BIAS, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.modernbert import SLIDING, modernbert_layer_types, modernbert_rope
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    norm="final_norm",
    head="decoder",
)
ATTENTION = AttentionNames(module="attn", out="Wo")
FIRST = NormPlacement(before_mlp="mlp_norm")
OTHERS = NormPlacement(before_attention="attn_norm", before_mlp="mlp_norm")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ModernBertDecoderForCausalLM, ModernBertDecoderModel."""
    if scope.head.kind in ("sequence", "token"):
        raise config.wrong("architectures", "ModernBertDecoderForCausalLM or ...Model")
    sizes = read_sizes(
        config,
        activation=("hidden_activation", "hidden_act"),
        default_activation="gelu",
        eps=1e-5,
        tied=True,
        kv_heads=config.int("num_attention_heads", ge=1),
    )
    bias = config.bool("attention_bias", False)
    norms = LAYER if config.bool("norm_bias", False) else LAYER_NO_BIAS
    half = config.int("local_attention", 128, ge=2) // 2
    mlp = GatedMLPSpec(merged="Wi", down="Wo", bias=config.bool("mlp_bias", False))
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=modernbert_rope(config, sizes.head_dim, kind, scope.max_positions),
                window=half if kind == SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
                names=ATTENTION,
            ),
            placement=OTHERS if layer else FIRST,
            feed_forward=mlp,
        )
        for layer, kind in enumerate(modernbert_layer_types(config, sizes.layers))
    )
    last = HeadLayerSpec(
        norms=norms,
        at=scope / "lm_head",
        activation=config.choice("classifier_activation", ("gelu", "silu", "relu"), "gelu"),
        bias=config.bool("classifier_bias", False),
    )
    generates = scope.head.kind == "lm"
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=norms,
            last_norm=last if generates else None,
            logits_bias=config.bool("decoder_bias", True),
            names=NAMES,
            ignored=() if generates else (r"lm_head\..*", r"decoder\..*"),
        ),
    )
