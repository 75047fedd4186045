"""The decoders of BART and its successors alone, as language models: without cross-attention, whose
tensors their checkpoints may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.positions import LearnedPositions, PositionsSpec, SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import MLP, NORMS, half_sizes, learned
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSpec,
    LayerSpec,
    plain_attention,
)
from headrace.back.models.decoder_layer import DecoderLayerSpec
from headrace.back.models.post_norm_layer import PostNormLayerSpec
from headrace.back.models.whisper import UNBIASED
from headrace.base.config.hf import ConfigReader

OWN = (NORMS[0], NORMS[2])
"""The norms of the two branches that are left."""
PLACEMENT = NormPlacement(before_attention=OWN[0], before_mlp=OWN[1])
ATTENTION = AttentionNames(out="out_proj")
IGNORED = (
    r"model\.decoder\.layers\.\d+\.encoder_attn.*",
    r"model\.decoder\.embed_positions\.(weights?|_float_tensor)",
    r"model\.decoder\.version",
)
Positions = Callable[[ConfigReader], PositionsSpec]


@dataclass(frozen=True, kw_only=True)
class DecoderForm:
    """What tells the members apart. `pre`: norms before each branch, and one behind the layers,
    `last_norm`; `embedding_norm`: one of the embeddings, before positions are added if
    `normed_first`; `head`: the output head; `bias`: the key that says whether attention has any,
    None: it has; `unbiased`: a linear layer without; `apart`: the head is no
    embedding, whatever is said; `keys`: what configs need not say."""

    pre: bool
    positions: Positions
    embedding_norm: bool = False
    normed_first: bool = False
    last_norm: str = "layer_norm"
    head: str = "lm_head"
    bias: str | None = None
    unbiased: str | None = None
    apart: bool = False
    keys: Mapping[str, object] | None = None


def _sines(config: ConfigReader) -> PositionsSpec:
    return SinusoidalPositions()


def _plain(config: ConfigReader) -> PositionsSpec:
    return learned(config, unused=0)


def _whisper(config: ConfigReader) -> PositionsSpec:
    rows = config.int("max_target_positions", 448, ge=1)
    return LearnedPositions(name="embed_positions", rows=rows)


def _trocr(config: ConfigReader) -> PositionsSpec:
    if config.bool("use_learned_position_embeddings", True):
        return learned(config)
    first = config.int("pad_token_id", 1, ge=0) + 1
    return SinusoidalPositions(first=first, spread=1)


BART = DecoderForm(pre=False, positions=learned, embedding_norm=True)
BLENDERBOT = DecoderForm(pre=True, positions=_plain)
FORMS: Mapping[str, DecoderForm] = {
    **dict.fromkeys(("BartForCausalLM", "MvpForCausalLM", "PLBartForCausalLM"), BART),
    "MBartForCausalLM": replace(BART, pre=True),
    "BlenderbotForCausalLM": BLENDERBOT,
    "BlenderbotSmallForCausalLM": replace(BART, positions=_plain, normed_first=True),
    "MarianForCausalLM": DecoderForm(pre=False, positions=_sines),
    "PegasusForCausalLM": DecoderForm(pre=True, positions=_sines),
    "BigBirdPegasusForCausalLM": replace(
        BLENDERBOT,
        last_norm="layernorm_embedding",
        bias="use_bias",
        apart=True,
        keys={"activation_function": "gelu_new", "scale_embedding": True},
    ),
    "WhisperForCausalLM": DecoderForm(
        pre=True, positions=_whisper, head="proj_out", unbiased=UNBIASED
    ),
    "TrOCRForCausalLM": DecoderForm(pre=False, positions=_trocr, head="output_projection"),
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """The ...ForCausalLM of FORMS."""
    named = config.raw["architectures"][0]
    form = FORMS[named]
    config = ConfigReader({**(form.keys or {}), **config.raw}, config.where)
    if config.bool("use_prompt", False):
        raise config.wrong("use_prompt", "false")
    sizes = half_sizes(config, "decoder")
    sizes = replace(sizes, tied=sizes.tied and not form.apart)
    bias = form.bias is None or config.bool(form.bias, False)
    attention = AttentionSpec(
        **plain_attention(sizes), rope=None, qkv_bias=bias, out_bias=bias, names=ATTENTION
    )
    layer: DecoderLayerSpec = LayerSpec(mixer=attention, placement=PLACEMENT, feed_forward=MLP)
    if not form.pre:
        layer = PostNormLayerSpec(mixer=attention, feed_forward=MLP, norms=OWN)
    normed = form.embedding_norm
    if form.head == "output_projection":
        normed = config.bool("layernorm_embedding", True)
    return Decoder(
        scope if form.unbiased is None else replace(scope, unbiased=form.unbiased),
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            embedding_scale=sizes.width**0.5 if config.bool("scale_embedding", False) else 1.0,
            positions=form.positions(config),
            normed_first=form.normed_first,
            names=DecoderNames(
                prefix="model.decoder",
                embedding_norm="layernorm_embedding" if normed else None,
                norm=form.last_norm if form.pre else None,
                head=form.head,
            ),
            ignored=IGNORED,
        ),
    )
