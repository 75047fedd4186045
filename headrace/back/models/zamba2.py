"""Zamba2: Mamba 2 in all layers, and in some before it a transformer block that these share, with
adapters of each layer's own. The block reads the token's embedding too, and what it gives goes into
the norm before Mamba alone.

T tokens, E hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.shared_block import SharedBlock, SharedBlockSpec, SharedBlockUse
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.mamba2 import Mamba2Spec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    read_sizes,
)
from headrace.back.models.decoder_layer import Stream
from headrace.back.models.ssm import divides, read_layer_kinds
from headrace.base.config.hf import ConfigReader

NAMES = DecoderNames(norm="final_layernorm")
MAMBA, HYBRID = "mamba", "hybrid"
KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "hybrid": HYBRID}
NORM_EPS = 1e-5
"""Of the gated norm, whatever the config says."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Zamba2ForCausalLM."""
    sizes = read_sizes(
        config,
        default_activation="gelu",
        eps=1e-5,
        tied=True,
        inner=4 * config.int("hidden_size", ge=1),
    )
    kinds = read_layer_kinds(config, sizes.layers, KINDS)
    hybrids = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
    count = config.int("num_mem_blocks", 1, ge=1)
    inside = scope if scope.head.bare else scope / NAMES.prefix
    block = _block(scope, config, sizes)
    places = (inside / NAMES.layers / str(layer) for layer in hybrids[:count])
    blocks = [SharedBlock(place / "shared_transformer", block) for place in places]
    mamba = _mamba(config, sizes)
    layers = tuple(
        ZambaLayerSpec(mamba=mamba)
        if kind == MAMBA
        else ZambaLayerSpec(
            mamba=mamba,
            number=hybrids.index(layer),
            block=blocks[hybrids.index(layer) % count],
        )
        for layer, kind in enumerate(kinds)
    )
    others = "|".join(map(str, hybrids[count:])) or "none"
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            names=NAMES,
            streams=KeptEmbeddingSpec(),
            ignored=(rf".*layers\.({others})\.shared_transformer\..*",),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ZambaLayerSpec:
    """A layer of Mamba; with a `block` before it, of which it is the use `number`."""

    mamba: MixerSpec
    block: SharedBlock | None = None
    number: int = 0

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> ZambaLayer:
        """See DecoderLayerSpec."""
        return ZambaLayer(scope, cache, self, sizes, norms)


class ZambaLayer:
    """See ZambaLayerSpec. The residual of its stream is [2, T, E]: the residual, and the tokens'
    embeddings."""

    tail = None
    takes_adapters = False

    def __init__(
        self, scope: Scope, cache: int, spec: ZambaLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._use = None
        self.kv_forms: tuple[CacheForm, ...] = ()
        if spec.block is not None:
            self._use = SharedBlockUse(scope, spec.block, number=spec.number, cache=cache)
            self.kv_forms = (self._use.form,)
            scope = scope / "mamba_decoder"
        self._norm = norms.build(scope / "input_layernorm", sizes.width, eps=sizes.eps)
        self.mixer: Mixer[Any] = spec.mamba.build(scope, cache + len(self.kv_forms))
        self.kv_forms += self.mixer.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        x_2TE = stream[1]
        x_TE = x_2TE[0]
        if self._use is not None:
            x_TE = x_TE + self._use.forward(x_TE, x_2TE[1], batch)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(self._norm.norm(x_TE), batch, at_N)
        if after is not None and at_N is not None:
            x_2TE, batch = x_2TE.index_select(1, at_N), after
        mixed_TE = self.mixer.attend_into(handed, x_2TE[0], batch)
        assert isinstance(mixed_TE, torch.Tensor), "a branch that does not add gives its sum"
        x_2TE[0] += mixed_TE
        return None, x_2TE


class KeptEmbeddingSpec:
    """The tokens' embeddings go through the layers beside the residual."""

    def build(self, scope: Scope, width: int) -> KeptEmbedding:
        """See ResidualStreamsSpec."""
        return KeptEmbedding()


class KeptEmbedding:
    """See KeptEmbeddingSpec."""

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """x_2TE."""
        return torch.stack((x_TE, x_TE))

    def end(self, x_STE: torch.Tensor) -> torch.Tensor:
        """The residual."""
        return x_STE[0]


def shared_block(
    sizes: DecoderSizes,
    *,
    head_dim: int,
    rope: RopeSpec | None = None,
    rank: int = 0,
    bias: bool = False,
    merged: str | None = None,
    adapts_attention: bool = False,
) -> SharedBlockSpec:
    """The block of either Zamba: it reads the residual beside the embedding, heads share both
    halves, and scores are scaled for half a head. The rest: see SharedBlockSpec."""
    return SharedBlockSpec(
        attention=AttentionSpec(
            width=2 * sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            scale=(head_dim / 2) ** -0.5,
            rope=rope,
        ),
        width=sizes.width,
        inner=sizes.inner,
        activation=sizes.activation,
        eps=sizes.eps,
        rank=rank,
        bias=bias,
        merged=merged,
        adapts_attention=adapts_attention,
    )


def _block(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> SharedBlockSpec:
    adapts = config.bool("use_shared_attention_adapter", False)
    if adapts and sizes.kv_heads != sizes.heads:
        raise config.wrong(
            "num_key_value_heads", f"num_attention_heads ({sizes.heads}) with adapters"
        )
    head_dim, rope = 2 * sizes.width // sizes.heads, None
    if config.bool("use_mem_rope", False):
        rope = read_rope(config, head_dim=head_dim, max_positions=scope.max_positions)
    return shared_block(
        sizes,
        head_dim=head_dim,
        rope=rope,
        rank=config.int("adapter_rank", 128, ge=1),
        bias=config.bool("add_bias_linear", False),
        merged="gate_up_proj",
        adapts_attention=adapts,
    )


def _mamba(config: ConfigReader, sizes: DecoderSizes) -> Mamba2Spec:
    inner = config.int("mamba_expand", 2, ge=1) * sizes.width
    heads = config.int("n_mamba_heads", 8, ge=1)
    if inner % heads:
        raise config.wrong("n_mamba_heads", f"a divisor of Mamba's inner size ({inner})")
    groups = divides(config, "mamba_ngroups", config.int("mamba_ngroups", 1, ge=1), heads)
    return Mamba2Spec(
        width=sizes.width,
        heads=heads,
        head_dim=inner // heads,
        state_dim=config.int("mamba_d_state", 64, ge=1),
        groups=groups,
        taps=config.int("mamba_d_conv", 4, ge=2, le=8),
        limits=(config.float("time_step_min", 0.001, ge=0.0), math.inf),
        bias=config.bool("add_bias_linear", False),
        norm=GatedNormSpec(eps=NORM_EPS, groups=groups),
        name="mamba",
    )
