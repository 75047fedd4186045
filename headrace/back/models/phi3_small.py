"""Phi-3-small (Abdin et al. 2024, section 2.1): layers whose attention is sparse in blocks between
dense ones, layer norms with biases, a bounded GeGLU, and scales of µP.

The keys are those of published_keys.py.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.attention.stripes import Stripes
from headrace.back.kernels.experts.op import SWIGLU_OAI
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.logits import TopOf
from headrace.back.layers.moe.lone import LoneExpert
from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.striped_attention import StripedAttentionSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(norm="final_layernorm")
ATTENTION = AttentionNames(merged="query_key_value", by_group=True, out="dense")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Phi3SmallForCausalLM."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    every = config.int("dense_attention_every_n_layers", 2, ge=0) or 0
    dense, sparse = _attention(scope, config, sizes)
    mlp = LoneExpert(
        inner=sizes.inner,
        name="mlp",
        activation=SWIGLU_OAI,
        clamp=config.float("gegelu_limit", 20.0, ge=0.0) or 0.0,
        merged="up_proj",
        paired=True,
        bias=True,
    )
    layers = tuple(
        LayerSpec(mixer=dense if every and (i + 1) % every == 0 else sparse, feed_forward=mlp)
        for i in range(sizes.layers)
    )
    spec = DecoderSpec(
        sizes=sizes,
        layers=layers,
        norm=LAYER,
        embedding_scale=config.float("mup_embedding_multiplier", 10.0, ge=0.0) or 1.0,
        logits_scale=1 / config.float("mup_width_multiplier", 8.0, ge=1e-6),
        names=NAMES,
    )
    unused = config.list("dummy_token_indices", (), of=int)
    if not all(0 <= token < sizes.vocabulary for token in unused):
        raise config.wrong("dummy_token_indices", f"tokens below {sizes.vocabulary}")
    return SparedDecoder(scope, spec, tuple(unused)) if unused else Decoder(scope, spec)


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes
) -> tuple[AttentionSpec, AttentionSpec]:
    """Dense, and sparse in blocks."""
    shared = plain_attention(sizes)
    shared |= {"qkv_bias": True, "out_bias": True, "names": ATTENTION}
    if config.bool("mup_use_scaling", True):
        shared["scale"] = config.float("mup_attn_multiplier", 1.0, ge=0.0) / sizes.head_dim
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    stride = config.int("blocksparse_vert_stride", 8, ge=1)
    step = max(1, stride // sizes.heads)
    if config.bool("blocksparse_homo_head_pattern", False):
        step = 0
    stripes = Stripes(
        block=config.int("blocksparse_block_size", 64, ge=1),
        near=config.int("blocksparse_num_local_blocks", 16, ge=1),
        stride=stride,
        phases=tuple(head * step for head in range(sizes.heads)),
    )
    sparse = StripedAttentionSpec(**shared, rope=rope, stripes=stripes)
    return AttentionSpec(**shared, rope=rope), sparse


class SparedDecoder(Decoder):
    """A decoder some of whose tokens nobody may choose."""

    def __init__(self, scope: Scope, spec: DecoderSpec, unused: tuple[int, ...]) -> None:
        super().__init__(scope, spec)
        self._unused = torch.tensor(unused, device=scope.device)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See CausalModel."""
        return super().logits(hidden_NE).index_fill_(1, self._unused, float("-inf"))

    @property
    def argmax(self) -> TopOf | None:
        """None: see CausalModel."""
        return None

    @property
    def top_candidates(self) -> TopOf | None:
        """None: see CausalModel."""
        return None
