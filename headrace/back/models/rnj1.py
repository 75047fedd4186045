"""Rnj-1: Gemma 3 whose local layers see the chunk of `sliding_window` tokens a query is in, and the
one before it."""

from __future__ import annotations

from headrace.back.kernels.attention.stripes import Stripes
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.striped_attention import StripedAttentionSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.gemma2 import gemma_sizes
from headrace.back.models.gemma3 import gemma3_attention, gemma3_decoder
from headrace.base.config.hf import ConfigReader

CHUNKED = "chunked_attention"
FULL = "full_attention"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Rnj1ForCausalLM."""
    sizes = gemma_sizes(config)
    kinds = config.list("layer_types", (FULL,) * sizes.layers, of=str, length=sizes.layers)
    if not set(kinds) <= {CHUNKED, FULL}:
        raise config.wrong("layer_types", f"{CHUNKED} and {FULL}")
    attention = gemma3_attention(config, sizes)
    ropes = {
        kind: read_rope(
            config, head_dim=sizes.head_dim, max_positions=scope.max_positions, layer_type=kind
        )
        for kind in sorted(set(kinds))
    }
    mixers: dict[str, AttentionSpec] = {}
    if FULL in ropes:
        mixers[FULL] = AttentionSpec(**attention, rope=ropes[FULL])
    if CHUNKED in ropes:
        size = config.int("sliding_window", ge=1)
        stripes = Stripes(block=size, near=2, stride=0, phases=(0,) * sizes.heads)
        mixers[CHUNKED] = StripedAttentionSpec(**attention, rope=ropes[CHUNKED], stripes=stripes)
    return gemma3_decoder(scope, config, sizes, (mixers[kind] for kind in kinds))
