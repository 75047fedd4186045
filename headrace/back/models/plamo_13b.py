"""PLaMo 13B (Preferred Networks 2023): both branches side by side behind one norm, and KV heads
that query heads share round by round (names and keys of the published checkpoint)."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.norm import NormPlacement
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
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(layers="layers.layers")
PLACEMENT = NormPlacement(before_attention="norm", parallel=True)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """PlamoForCausalLM. GGUF files have query heads in our order."""
    sizes = read_sizes(config)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            names=AttentionNames(tiled=config.bool("tiled_heads", True)),
        ),
        placement=PLACEMENT,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, names=NAMES))
