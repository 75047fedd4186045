"""Qwen3-Next: three layers with the gated delta rule to one of gated attention, experts in all. The
projections of a key head lie together in the checkpoint."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.linear import MergedTensor
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import BETA, DECAY, GATE, KEY, QUERY, VALUE, DeltaNames
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.hybrid import qwen_draft_layer, qwen_mixers
from headrace.back.models.moe import feed_forwards, sparse_layers
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.base.config.hf import ConfigReader

DRAFTS = r"mtp\..*"
"""Tensors that only draft tokens."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3NextForCausalLM."""
    sizes = read_sizes(config)
    groups = config.int("linear_num_key_heads", 16, ge=1)
    qkvz = MergedTensor(name="in_proj_qkvz", parts=(QUERY, KEY, VALUE, GATE), groups=groups)
    ba = MergedTensor(name="in_proj_ba", parts=(BETA, DECAY), groups=groups)
    names = DeltaNames(merged=(qkvz, ba), convs=("conv1d",), out="out_proj")
    if config.bool("separate_qkvz", False):  # GGUF files
        qkv = MergedTensor(name="in_proj_qkv", parts=(QUERY, KEY, VALUE))
        parts = ("q", "k", "v", "in_proj_z", "b", "a")
        names = replace(names, parts=parts, merged=(qkv, ba))
    mixture = qwen_mixture(config, renormalize=True)
    sparse = feed_forwards(mixture, sparse_layers(config, sizes.layers))
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward)
        for mixer, feed_forward in zip(
            qwen_mixers(scope, config, sizes, names), sparse, strict=True
        )
    )
    spec = DecoderSpec(
        sizes=sizes,
        layers=layers,
        norm=RMS_UNIT_OFFSET,
        ignored=(DRAFTS,),
        draft_layer=qwen_draft_layer(scope, config, sizes, mixture),
    )
    return Decoder(scope, spec)
