"""GPT-Neo: GPT-2 with a tensor each for query, key and value, unscaled scores and windows in every
other layer (Black et al. 2021)."""

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
from headrace.back.models.families import HEADS
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(before_attention="ln_1", before_mlp="ln_2")
NAMES = DecoderNames(prefix="transformer", embedding="wte", layers="h", norm="ln_f")
ATTENTION = AttentionNames(module="attn.attention", out="out_proj")
MASKS = r".*\.attn\.attention\.(masked_)?bias"
KINDS = ("global", "local")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GPTNeoForCausalLM."""
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    sizes = read_sizes(
        config,
        kv_heads=heads,
        activation=("activation_function",),
        gated=False,
        default_activation="gelu_new",
        eps=1e-5,
        tied=True,
    )
    window = config.int("window_size", 256, ge=1)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **{**plain_attention(sizes), "scale": 1.0},
                rope=None,
                window=window if kind == "local" else None,
                out_bias=True,
                names=ATTENTION,
            ),
            placement=PLACEMENT,
            feed_forward=PlainMLPSpec(up="c_fc", down="c_proj", bias=True),
        )
        for kind in _kinds(config, sizes.layers)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=LAYER,
            positions=LearnedPositions(
                name="wpe", rows=config.int("max_position_embeddings", 2048, ge=1)
            ),
            names=NAMES,
            ignored=(MASKS,),
        ),
    )


def _kinds(config: ConfigReader, layers: int) -> tuple[str, ...]:
    """Of each layer: `attention_layers`, or `attention_types`, which lists kinds and how often they
    are repeated; else one kind after the other."""
    kinds = config.list("attention_layers", None, of=str)
    if kinds is None:
        types = config.list("attention_types", (), of=list)
        try:
            kinds = tuple(kind for repeated, times in types for kind in repeated * times)
        except (TypeError, ValueError):
            raise config.wrong("attention_types", "pairs of kinds and how often") from None
        kinds = kinds or tuple(KINDS[i % 2] for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= set(KINDS):
        key = "attention_layers" if "attention_layers" in config else "attention_types"
        raise config.wrong(key, f"{layers} of {', '.join(KINDS)}")
    return kinds
