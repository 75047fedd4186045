"""ruGPT-3 XL: a GPT with learned positions. In all or every other of its layers queries see their
own group of blocks and a few blocks of each group before it."""

from __future__ import annotations

from headrace.back.kernels.attention.stripes import Stripes
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import LearnedPositions
from headrace.back.layers.scope import Scope
from headrace.back.layers.striped_attention import StripedAttentionSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """RuGPT3XLForCausalLM."""
    sizes = read_sizes(config, gated=False, default_activation="gelu_new", eps=1e-5, tied=True)
    shared = {**plain_attention(sizes), "rope": None, "qkv_bias": True, "out_bias": True}
    dense = sparse = AttentionSpec(**shared)
    mode = config.choice("sparse_mode", ("none", "alternating", "all"), "none")
    if mode != "none":
        sparse = StripedAttentionSpec(**shared, stripes=_stripes(config, sizes.heads))
    mlp = PlainMLPSpec(up="up_proj", down="down_proj", bias=True)
    layers = tuple(
        LayerSpec(mixer=dense if mode == "alternating" and layer % 2 else sparse, feed_forward=mlp)
        for layer in range(sizes.layers)
    )
    rows = config.int("max_position_embeddings", ge=1)
    positions = LearnedPositions(name="embed_positions", rows=rows)
    spec = DecoderSpec(sizes=sizes, layers=layers, norm=LAYER, positions=positions)
    return Decoder(scope, spec)


def _stripes(config: ConfigReader, heads: int) -> Stripes:
    """Of each group before, the last blocks are seen by the first head, those before them by the
    next one, and so on, until `patterns` heads took their turns."""
    group = config.int("sparse_num_local_blocks", ge=1)
    wide = config.int("sparse_num_global_blocks", ge=1)
    patterns = config.int("sparse_num_different_global_patterns", ge=1)
    if wide * patterns > group:
        raise config.wrong(
            "sparse_num_different_global_patterns",
            f"at most sparse_num_local_blocks ({group}) by sparse_num_global_blocks ({wide})",
        )
    stripes = Stripes(
        block=config.int("sparse_block_size", ge=1),
        near=group,
        grouped=True,
        stride=group,
        wide=wide,
        phases=tuple((head % patterns + 1) * wide - 1 for head in range(heads)),
    )
    if config.int("max_position_embeddings", ge=1) % stripes.reach:
        raise config.wrong("max_position_embeddings", f"a multiple of {stripes.reach}")
    return stripes
