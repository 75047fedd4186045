"""Qwen 4 (experimental): the gated delta rule, and in every fourth layer gated attention over
groups of positions that an indexer chooses, in a residual of streams that gate themselves; experts
in all layers, and in some what n-grams of tokens add to the streams."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.gated_streams import GatedStreamsSpec
from headrace.back.layers.group_indexer import MeanGroupSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.ngram_inputs import NGramSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    read_sizes,
)
from headrace.back.models.hybrid import gated_attention, read_gated_delta
from headrace.back.models.hyper_layer import HyperLayerSpec
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen3_5 import DELTA
from headrace.back.models.qwen3_next import DRAFTS
from headrace.base.config.hf import ConfigReader

LINEAR, ATTENDS = "linear_attention", ("indexed_attention", "full_attention")
NAMES = DecoderNames(norm=None)
VISION = r"model\.visual\..*"
HASHES = r".*\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)"
"""Stored, but they follow from the config."""
SHARDS = r".*\.ngram_embedding\.shard_\d+\.weight"
"""Of a table, of which a rank reads those with its rows."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen4ExpForCausalLM, and the text side of Qwen4ExpForConditionalGeneration."""
    sizes = read_sizes(config, inner=1)
    streams = GatedStreamsSpec(
        streams=config.int("hc_count", 4, ge=2, le=16),
        rank=config.int("hc_lowrank", 320, ge=1),
        eps=sizes.eps,
    )
    gate = config.choice("output_gate_type", ("silu", "sigmoid"), "silu", aliases=("hidden_act",))
    delta = read_gated_delta(config, sizes, DELTA)
    delta = replace(delta, norm=replace(delta.norm, gate=gate))
    attention = _attention(scope, config, sizes)
    mixture = qwen_mixture(config, renormalize=True)
    with_ngrams = config.list("ple_layer_ids", [], of=int)
    layers = tuple(
        HyperLayerSpec(
            mixer=delta if kind == LINEAR else attention,
            feed_forward=mixture,
            streams=streams,
            ngrams=_ngrams(config, sizes, streams.streams, sorted(set(with_ngrams)).index(i + 1))
            if i + 1 in with_ngrams
            else None,
            normed=False,
        )
        for i, kind in enumerate(_kinds(config, sizes.layers))
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            streams=streams,
            names=NAMES,
            ignored=(DRAFTS, VISION, HASHES, SHARDS),
        ),
    )


def _attention(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> MixerSpec:
    attention: AttentionSpec = gated_attention(scope, config, sizes)
    assert attention.rope is not None
    group = config.int("indexer_compress_ratio", ge=1)
    budget = config.int("indexer_budget", ge=1)
    if budget % group:
        raise config.wrong("indexer_budget", f"a multiple of indexer_compress_ratio ({group})")
    if config.int("indexer_kv_heads", 1, ge=1) != 1:
        raise config.wrong("indexer_kv_heads", "1")
    dim = config.int("indexer_head_dim", ge=attention.rope.rotary_dim)
    chooser = MeanGroupSpec(
        heads=config.int("indexer_n_heads", ge=1),
        dim=dim,
        group=group,
        top_groups=budget // group,
        eps=sizes.eps,
        rope=replace(attention.rope, head_dim=dim),
    )
    return replace(attention, chooser=chooser)


def _ngrams(config: ConfigReader, sizes: DecoderSizes, streams: int, index: int) -> NGramSpec:
    longest = config.int("ngram_size", 3, ge=2, le=16)
    heads = config.int("heads_per_ngram", 8, ge=1)
    values = config.int("ple_embed_dim", sizes.width, ge=1)
    if values % ((longest - 1) * heads):
        allowed = f"a multiple of (ngram_size - 1) * heads_per_ngram ({(longest - 1) * heads})"
        raise config.wrong("ple_embed_dim", allowed)
    ends = config.ids("eos_token_id", below=sizes.vocabulary)
    if not ends:
        raise config.wrong("eos_token_id", "an id, where ple_layer_ids lists layers")
    return NGramSpec(
        streams=streams,
        index=index,
        vocabulary=sizes.vocabulary,
        longest=longest,
        heads=heads,
        values=values,
        base=config.int("ngram_vocab_size_base", 20_000_000, ge=2, le=1 << 31),
        divisor=config.int("make_ngram_vocab_size_divisible_by", 128, ge=1),
        parts=config.int("split_ngram_parts", 512, ge=1),
        seed=config.int("seed", 1234, ge=0),
        end_id=ends[0],
        taps=config.int("ple_conv_kernel_size", 4, ge=1, le=16),
        eps=sizes.eps,
    )


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    types = config.list("layer_types", None, of=str)
    if types is None:
        every = config.int("full_attention_interval", 4, ge=1)
        return [LINEAR if (i + 1) % every else ATTENDS[0] for i in range(layers)]
    if len(types) != layers or not set(types) <= {LINEAR, *ATTENDS}:
        raise config.wrong("layer_types", f"{layers} of {LINEAR}, {', '.join(ATTENDS)}")
    return list(types)
