"""BART (Lewis et al. 2020): learned positions, layer norms behind each branch and behind the
embeddings, biases everywhere.

Its successors differ in where the norms stand and in their positions (`BartForm`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from headrace.back.layers.mlp import FeedForwardSpec, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import LearnedPositions, PositionsSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.crossing_layer import plain_cross_layer
from headrace.back.models.encoder import (
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    TokenLayer,
    WholeBranch,
)
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.base.config.hf import ConfigReader

EPS = 1e-5
"""No config states it."""
UNUSED = 2
"""Rows of the position tables before that of the first token."""
CROSS_NAMES = ("encoder_attn", "q_proj", "k_proj", "v_proj", "out_proj")
NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
MLP = PlainMLPSpec(name="", up="fc1", down="fc2", bias=True)
SHARED = (
    r"\w+\.(encoder|decoder)\.embed_tokens\.weight",
    r"\w+\.(encoder|decoder)\.embed_positions\.weights?",  # those that are not learned
    r"lm_head\.weight",
)


class MakeEncoderLayer(Protocol):
    """Makes a layer of the encoder, of sizes, by its number."""

    def __call__(self, scope: Scope, sizes: EncoderSizes, *, index: int) -> TokenLayer:
        """`scope` is the layer's."""
        ...


@dataclass(frozen=True, kw_only=True)
class BartForm:
    """What tells the family's members apart. `pre`: norms before each branch, and one behind each
    stack; `embedding_norm`: one behind the embeddings, in the decoder before positions are added if
    `normed_first`; `logits_bias`: one is added to logits. `encoder_attention` makes that of an
    encoder's layer, by its number, where it is another; `ignored`: tensors besides; `prefix`: of
    all but the head. `feed_forward`: of a layer, by its half and number; `cross`: what its
    cross-attention is called, `norms`: what those of its branches are. `stacks`: the halves;
    `last_norm`: behind each. `bias`: attention has them. `encoder_layer`: makes one of the encoder,
    by its number, where it is another."""

    pre: bool
    embedding_norm: bool = True
    normed_first: bool = False
    logits_bias: bool = True
    encoder_attention: Callable[[Scope, EncoderSizes, int], TokenLayer] | None = None
    ignored: tuple[str, ...] = ()
    prefix: str = "model"
    feed_forward: Callable[[str, int], FeedForwardSpec] = lambda half, layer: MLP
    cross: str = CROSS_NAMES[0]
    norms: tuple[str, str, str] = NORMS
    stacks: tuple[str, str] = ("encoder", "decoder")
    last_norm: str = "layer_norm"
    bias: bool = True
    encoder_layer: MakeEncoderLayer | None = None


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """BartForConditionalGeneration."""
    return build_bart(scope, config, BartForm(pre=False), positions=learned(config))


def build_bart(
    scope: Scope,
    config: ConfigReader,
    form: BartForm,
    *,
    positions: PositionsSpec,
    read_positions: PositionsSpec | None = None,
) -> EncoderDecoder:
    """A member of the family; `read_positions`: those of its encoder, where they are not the
    decoder's."""
    spec = bart_spec(scope, config, form, positions=positions)
    if read_positions is not None:
        spec = replace(spec, encoder=replace(spec.encoder, positions=read_positions))
    return EncoderDecoder(scope, spec)


def bart_spec(
    scope: Scope, config: ConfigReader, form: BartForm, *, positions: PositionsSpec
) -> EncoderDecoderSpec:
    """A member of the family as data."""
    sizes, encoder = half_sizes(config, "decoder"), encoder_sizes(config)
    names = {
        "embedding_norm": "layernorm_embedding" if form.embedding_norm else None,
        "norm": form.last_norm if form.pre else None,
    }
    make = form.encoder_layer or partial(bart_encoder_layer, form=form)
    scale = sizes.width**0.5 if config.bool("scale_embedding", False) else 1.0
    layers = tuple(
        plain_cross_layer(
            scope,
            sizes,
            bias=form.bias,
            cross=(form.cross, *CROSS_NAMES[1:]),
            feed_forward=form.feed_forward("decoder", i),
            norms=form.norms,
            post=not form.pre,
        )
        for i in range(sizes.layers)
    )
    return EncoderDecoderSpec(
        sizes=sizes,
        encoder_layers=encoder.layers,
        encoder_layer=lambda at, i: make(at, encoder, index=i),
        layers=layers,
        norm=LAYER,
        encoder=StackSpec(stack=form.stacks[0], **names),
        decoder=StackSpec(stack=form.stacks[1], **names, normed_first=form.normed_first),
        positions=positions,
        embedding_scale=scale,
        head=None if sizes.tied else "lm_head",
        logits_bias="final_logits_bias" if form.logits_bias else None,
        prefix=form.prefix,
        ignored=(*(SHARED if sizes.tied else SHARED[:2]), *form.ignored),
    )


def learned(
    config: ConfigReader, *, key: str = "max_position_embeddings", unused: int = UNUSED
) -> PositionsSpec:
    """A table of positions for each stack, of as many rows as the config has under `key`."""
    rows = config.int(key, 1024, ge=1)
    return LearnedPositions(name="embed_positions", rows=rows, unused=unused)


def bart_encoder_layer(
    scope: Scope, sizes: EncoderSizes, form: BartForm, index: int
) -> EncoderLayer:
    """One layer of the encoder."""
    make = form.encoder_attention or _encoder_attention
    attention, mlp = (
        LAYER.build(scope / name, sizes.width, eps=sizes.eps) for name in form.norms[::2]
    )
    branch = form.feed_forward("encoder", index).build(scope, sizes.feed_forward)
    return EncoderLayer(
        attention=make(scope / "self_attn", sizes, index),
        mlp=branch if isinstance(branch, PlainMLP) else WholeBranch(branch),
        before_attention=attention if form.pre else None,
        after_attention=None if form.pre else attention,
        before_mlp=mlp if form.pre else None,
        after_mlp=None if form.pre else mlp,
    )


def _encoder_attention(scope: Scope, sizes: EncoderSizes, index: int) -> TokenLayer:
    return SpanAttentionLayer(scope, sizes, names=("q_proj", "k_proj", "v_proj"), out="out_proj")


def half_sizes(config: ConfigReader, half: str) -> DecoderSizes:
    """Those of one half, checked."""
    width = config.int("d_model", ge=1)
    heads = config.int(f"{half}_attention_heads", ge=1)
    if width % heads:
        raise config.wrong(f"{half}_attention_heads", f"a divisor of d_model ({width})")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int(f"{half}_ffn_dim", ge=1),
        layers=config.int(f"{half}_layers", ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=PLAIN_ACTIVATIONS[
            config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu")
        ],
        tied=config.bool("tie_word_embeddings", True),
    )


def encoder_sizes(config: ConfigReader, half: str = "encoder") -> EncoderSizes:
    """Those of one half, as encoders take them."""
    sizes = half_sizes(config, half)
    return EncoderSizes(
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        inner=sizes.inner,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        eps=sizes.eps,
        activation=sizes.activation,
    )
