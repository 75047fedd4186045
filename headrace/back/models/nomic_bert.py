"""Nomic Embed (Nussbaum et al. 2024): BERT with rotary instead of learned positions, gated MLPs and
no biases; the second one has biases, MLPs without gates, and experts in every other layer.

Jina Embeddings v3 (jina_embeddings_v3.py) shares all of it but the MLP, the biases and the
classification head. Tensors are named as the authors' checkpoints and transformers' own ones name
them: one for queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.layers.classifier import Classifier
from headrace.back.layers.mlp import ElementwiseActivation, GatedMLP, PlainMLP, PlainMLPSpec
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec, RouterSpec
from headrace.back.layers.moe.stacked import FlatUngatedExperts, UngatedExperts
from headrace.back.layers.moe.weights import ExpertLayout
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, POOLER, BertEmbeddings, pooler_head
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    TokenBranch,
    WholeBranch,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

_GATE_UP_DOWN = ("fc12", "fc11", "fc2")


@dataclass(frozen=True, kw_only=True)
class RotaryBert:
    """What these families do not share. `prefix`: of the base model's tensors; `layers`: where they
    lie in it; `embedding_norm`: the norm of tokens; `attention`: that module in a layer, with its
    `merged` projection and the one `out`; `norms`: behind both branches; `biased`: whether
    projections are; `theta`: the rope's usual base, where there is no `rope` read already, or
    `first_position`, where text begins in learned positions instead; `pools`: the head takes the
    base model's pooler; `mlp`, of a layer by its number, and `head` make these parts; `ignored`,
    `renamed`: see Encoder."""

    prefix: str
    attention: str
    biased: bool
    eps: float
    pools: bool
    mlp: Callable[[Scope, EncoderSizes, int], TokenBranch]
    head: Callable[[Scope, Scope, int], Classifier | None]
    theta: float = 10_000.0
    rope: RopeSpec | None = None
    layers: str = "encoder.layers"
    embedding_norm: str = "emb_ln"
    merged: str = "Wqkv"
    out: str = "out_proj"
    norms: tuple[str, str] = ("norm1", "norm2")
    first_position: int | None = None
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """NomicBertModel, NomicBertForSequenceClassification, NomicBertForTokenClassification,
    NomicBertForMaskedLM. Sizes stand under common keys besides (published_keys.py)."""
    for key in ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    if config.float("rotary_emb_fraction", 1.0) != 1.0:
        raise config.wrong("rotary_emb_fraction", "1")
    kind = RotaryBert(
        prefix="nomic_bert",
        attention="attn",
        biased=config.bool("qkv_proj_bias", False),
        theta=1000.0,
        eps=1e-12,
        pools=True,
        mlp=_mlps(config),
        head=pooler_head,
    )
    return build_rotary_bert(scope, config, kind)


def build_rotary_bert(scope: Scope, config: ConfigReader, kind: RotaryBert) -> Encoder:
    """The encoder with its tensors under `kind.prefix` unless the checkpoint is bare."""
    sizes = read_encoder_sizes(config, eps=kind.eps)
    rope = kind.rope
    if rope is None and kind.first_position is None:
        rope = read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_theta=kind.theta,
        )
    inside = scope if scope.head.bare else scope / kind.prefix
    embeddings = BertEmbeddings(
        inside / "embeddings",
        sizes,
        config,
        norm=inside / kind.embedding_norm,
        first_position=kind.first_position,
    )
    pooled = kind.pools and scope.head.kind == "sequence"
    return Encoder(
        scope,
        sizes,
        embed=embeddings.embed,
        layers=[
            _layer(inside / kind.layers / str(i), sizes, kind, rope, i) for i in range(sizes.layers)
        ],
        norm=None,
        classifier=kind.head(scope, inside, sizes.width),
        ignored=(*IGNORED, *kind.ignored) if pooled else (*IGNORED, *kind.ignored, POOLER),
        segments=embeddings.num_types > 1,
        renamed=kind.renamed,
    )


def _layer(
    scope: Scope, sizes: EncoderSizes, kind: RotaryBert, rope: RopeSpec | None, index: int
) -> EncoderLayer:
    return EncoderLayer(
        attention=SpanAttentionLayer(
            scope / kind.attention,
            sizes,
            names=(kind.merged,),
            out=kind.out,
            bias=kind.biased,
            rope=rope,
        ),
        after_attention=LayerNorm(scope / kind.norms[0], sizes.width, eps=sizes.eps),
        mlp=kind.mlp(scope / "mlp", sizes, index),
        after_mlp=LayerNorm(scope / kind.norms[1], sizes.width, eps=sizes.eps),
    )


def _mlps(config: ConfigReader) -> Callable[[Scope, EncoderSizes, int], TokenBranch]:
    """Gated where the activation says so; experts in every `moe_every_n_layers`-th layer."""
    gated = config.choice("activation_function", ("swiglu", "geglu", "gelu"), "swiglu") != "gelu"
    up, down = (config.bool(f"mlp_fc{i}_bias", False) for i in (1, 2))
    every = config.int("moe_every_n_layers", 0, ge=0)
    if not gated and up != down:
        raise config.wrong("mlp_fc2_bias", f"as mlp_fc1_bias is ({str(up).lower()})")
    experts = _experts(config) if every else None
    apart = config.bool("experts_apart", False)  # GGUF files have a tensor for each, and no bias

    def mlp(scope: Scope, sizes: EncoderSizes, index: int) -> TokenBranch:
        if experts is not None and index % every == 1:
            return NomicExperts(scope, experts, sizes, apart=apart)
        if gated:
            return GatedMLP(scope, sizes.feed_forward, names=_GATE_UP_DOWN, bias=up, down_bias=down)
        activation = ElementwiseActivation(scope, sizes.activation)
        spec = PlainMLPSpec(name="", up="fc1", down="fc2", bias=up)
        return PlainMLP(scope, spec, sizes.feed_forward, activation)

    return mlp


def _experts(config: ConfigReader) -> RouterSpec:
    experts = config.int("num_experts", ge=1)
    if config.bool("expert_choice_router", False):
        raise config.wrong("expert_choice_router", "false")
    if config.int("num_shared_experts", 0, ge=0):
        raise config.wrong("num_shared_experts", "0")
    if config.int("ffn_div", 1, ge=1) != 1:
        raise config.wrong("ffn_div", "1")
    return RouterSpec(
        experts=experts,
        top_k=config.int("moe_top_k", 1, ge=1, le=experts),
        renormalize=config.bool("moe_normalize_expert_weights", False),
        name="router.layer",
    )


class NomicExperts:
    """x_TE -> y_TE: experts without gates, and a bias that all of them share. `apart`: a tensor for
    each expert, and no bias."""

    def __init__(
        self, scope: Scope, router: RouterSpec, sizes: EncoderSizes, *, apart: bool
    ) -> None:
        layout: ExpertLayout = FlatUngatedExperts(up="experts.mlp.w1", down="experts.mlp.w2")
        if apart:
            names = (f"experts.{{}}.{one}_proj.weight" for one in ("up", "down"))
            layout = UngatedExperts(up=next(names), down=next(names))
        spec = MixtureSpec(router=router, inner=sizes.inner, layout=layout)
        mixture = Mixture(scope, spec, sizes.width, activation=sizes.activation, adds=False)
        self._branch = WholeBranch(mixture)
        self._bias = None
        if not apart:
            self._bias = scope.param("experts.bias", (sizes.width,), init="zeros")
        self._bias_E: torch.Tensor | float = 0.0
        scope.on_finish(self._finish)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._branch.forward(x_TE) + self._bias_E

    def _finish(self) -> None:
        if self._bias is not None:
            self._bias_E = self._bias.take()
