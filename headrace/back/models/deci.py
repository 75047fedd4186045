"""DeciLM 7B and Nemotron's models found by search (Llama-3.1 and 3.3-Nemotron-51B, Super, Ultra):
Llama's decoder whose layers differ in KV heads and inner sizes, and may lack a branch or have one
matrix in its place (names and keys of the published checkpoints)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.linear_branch import LinearFeedForwardSpec, LinearMixerSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardSpec, GatedMLPSpec
from headrace.back.layers.norm import PRE
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.cached_layers import KV_HEADS_LISTED
from headrace.base.config.hf import ConfigReader

MULTIPLE = 256
"""Of which inner sizes are multiples, rounded up."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeciLMForCausalLM. A block without attention, or without an MLP, lacks the norm before it
    too."""
    width = config.int("hidden_size", ge=1)
    sizes = read_sizes(config, inner=width)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    bias = config.bool("attention_bias", False), config.bool("mlp_bias", False)
    if "block_configs" not in config:
        counts = config.list(KV_HEADS_LISTED, of=int, length=sizes.layers)
        blocks = [_Block(one, None, GatedMLPSpec(bias=bias[1])) for one in counts]
    else:
        blocks = _blocks(config, sizes, bias=bias[1])
    for block in blocks:
        if block.kv_heads and sizes.heads % block.kv_heads:
            raise config.wrong(KV_HEADS_LISTED, f"divisors of num_attention_heads ({sizes.heads})")
    layers = tuple(_layer(block, sizes, rope, bias=bias[0]) for block in blocks)
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


@dataclass(frozen=True)
class _Block:
    """`kv_heads` 0: it does not attend, but may have a matrix `instead`."""

    kv_heads: int
    instead: LinearMixerSpec | None
    feed_forward: FeedForwardSpec | None


def _layer(block: _Block, sizes: DecoderSizes, rope: RopeSpec, *, bias: bool) -> LayerSpec:
    mixer: MixerSpec | None = block.instead
    placement = PRE
    if block.kv_heads:
        plain = plain_attention(replace(sizes, kv_heads=block.kv_heads))
        mixer = AttentionSpec(**plain, rope=rope, qkv_bias=bias, out_bias=bias)
    if mixer is None:
        placement = replace(placement, before_attention=None)
    if block.feed_forward is None:
        placement = replace(placement, before_mlp=None)
    return LayerSpec(mixer=mixer, placement=placement, feed_forward=block.feed_forward)


def _blocks(config: ConfigReader, sizes: DecoderSizes, *, bias: bool) -> list[_Block]:
    counts = config.list(KV_HEADS_LISTED, of=int, length=sizes.layers)
    blocks = []
    for i, (count, raw) in enumerate(zip(counts, config.raw["block_configs"], strict=True)):
        reader = ConfigReader(raw, f"{config.where}: block_configs: {i}")
        attention, mlp = reader.section("attention"), reader.section("ffn")
        assert attention is not None, "published_keys.py has read it"
        if mlp is None:
            raise reader.wrong("ffn", "an object: the block's MLP")
        for part in (attention, mlp):
            for key in ("sparsify", "sparse_mlp", "unshifted_sink", "is_mamba"):
                if part.raw.get(key):
                    raise part.wrong(key, "false or null")
        for key in ("window_length", "num_sink_tokens", "prefill_sliding_window"):
            if attention.raw.get(key):
                raise attention.wrong(key, "null")
        instead = None
        if attention.bool("replace_with_linear", False):
            name = attention.str("linear_name", "self_attn.linear_attn")
            instead = LinearMixerSpec(name=name, width=sizes.width)
        blocks.append(_Block(count, instead, _feed_forward(mlp, sizes.width, bias=bias)))
    return blocks


def _feed_forward(mlp: ConfigReader, width: int, *, bias: bool) -> FeedForwardSpec | None:
    if mlp.bool("no_op", False):
        return None
    if mlp.bool("replace_with_linear", False):
        return LinearFeedForwardSpec(name="mlp.linear_mlp")
    return GatedMLPSpec(bias=bias, inner=_inner(mlp, width))


def _inner(mlp: ConfigReader, width: int) -> int:
    """As stated, or by a factor of two thirds of the width, twice, in whole multiples."""
    stated = mlp.int("intermediate_size", None, ge=1)
    if stated is not None:
        return stated
    inner = int(2 * mlp.float("ffn_mult", ge=1e-3) * width / 3)
    return -(-inner // MULTIPLE) * MULTIPLE
