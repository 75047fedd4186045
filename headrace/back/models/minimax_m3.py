"""MiniMax-M3: a norm over each query and key head, heads rotated in part, and in most layers
attention over the blocks of positions that an indexer chooses for each KV head; gpt-oss's bounded
activation in dense layers and experts, which sigmoid scores and a bias choose."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.kernels.experts.op import OAI_ALPHA, SWIGLU_OAI
from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.group_indexer import BestKeySpec
from headrace.back.layers.mlp import FeedForwardSpec
from headrace.back.layers.moe.lone import LoneExpert
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.mixtral import LAYOUT
from headrace.back.models.moe import CORRECTION_BIAS, divided, scored_by
from headrace.base.config.hf import ConfigReader

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
THETA = 5_000_000.0
RENAMED = (
    (r"\.block_sparse_moe\.(experts|gate|shared_experts)\.", r".mlp.\1."),
    (r"\.block_sparse_moe\.e_score_correction_bias", f".mlp.{CORRECTION_BIAS}"),
    (r"\.self_attn\.index_([qk])_(proj|norm)\.", r".self_attn.indexer.\1_\2."),
)
DRAFTS = (r"(.*\.)?mtp\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniMaxM3VLForCausalLM, and the text part of MiniMaxM3SparseForConditionalGeneration."""
    sizes = read_sizes(config)
    attention = {
        kind: _attention(scope, config, sizes, sparse=kind == SPARSE) for kind in (FULL, SPARSE)
    }
    mixture, dense = _feed_forwards(config, sizes.inner)
    kinds, branches = _kinds(config, sizes.layers), _sparse(config, sizes.layers)
    layers = tuple(
        LayerSpec(mixer=attention[kind], feed_forward=mixture if is_sparse else dense)
        for kind, is_sparse in zip(kinds, branches, strict=True)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes, layers=layers, norm=RMS_UNIT_OFFSET, renamed=RENAMED, ignored=DRAFTS
        ),
    )


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, *, sparse: bool
) -> AttentionSpec:
    rotary = config.int("rotary_dim", 64, ge=2, le=sizes.head_dim)
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=THETA,
        default_share=rotary / sizes.head_dim,
    )
    chooser = None
    if sparse:
        section = config.section("sparse_attention_config") or config
        dim = section.int("index_head_dim", 128, aliases=("sparse_index_dim",), ge=rope.rotary_dim)
        heads = section.int("index_n_heads", 4, aliases=("sparse_num_index_heads",), ge=1)
        if heads != sizes.kv_heads:
            raise section.wrong("index_n_heads", f"num_key_value_heads ({sizes.kv_heads})")
        chooser = BestKeySpec(
            heads=heads,
            dim=dim,
            group=section.int("index_block_size", 128, aliases=("sparse_block_size",), ge=1),
            top_groups=section.int("index_topk_blocks", 16, aliases=("sparse_topk_blocks",), ge=1),
            local=section.int("index_local_blocks", 1, aliases=("sparse_local_block",), ge=0),
            eps=sizes.eps,
            rope=replace(rope, head_dim=dim),
        )
    return AttentionSpec(
        **plain_attention(sizes),
        rope=rope,
        qk_norm=QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
        chooser=chooser,
    )


def _feed_forwards(config: ConfigReader, inner: int) -> tuple[FeedForwardSpec, FeedForwardSpec]:
    """The experts, and the MLP of dense layers."""
    if config.float("swiglu_alpha", OAI_ALPHA) != OAI_ALPHA:
        raise config.wrong("swiglu_alpha", str(OAI_ALPHA))
    bounded = {
        "activation": SWIGLU_OAI,
        "clamp": config.float("swiglu_limit", 7.0, ge=0.0),
    }
    experts = config.int("num_local_experts", 128, ge=1, aliases=("num_experts",))
    shared = config.int("shared_intermediate_size", inner, ge=1)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 4, ge=1, le=experts),
            score=scored_by(config, "sigmoid"),
            renormalize=True,
            scale=config.float("routed_scaling_factor", 1.0),
            bias_name=CORRECTION_BIAS,
        ),
        inner=inner,
        layout=LAYOUT,
        shared=SharedSpec(inner=divided(config, "shared_intermediate_size", shared, inner)),
        **bounded,
    )
    dense = config.int("dense_intermediate_size", 12288, ge=1)
    return mixture, LoneExpert(inner=dense, name="mlp", **bounded)


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    """By `layer_types`, or by the section that the first checkpoints have."""
    section = config.section("sparse_attention_config")
    types = config.list("layer_types", None, of=str)
    if types is None and section is not None:
        frequencies = section.list("sparse_attention_freq", [0] * layers, of=int, length=layers)
        types = [SPARSE if one else FULL for one in frequencies]
    if types is None:
        types = [FULL] * layers
    if len(types) != layers or not set(types) <= {FULL, SPARSE}:
        raise config.wrong("layer_types", f"{layers} of {FULL}, {SPARSE}")
    return list(types)


def _sparse(config: ConfigReader, layers: int) -> list[bool]:
    types = config.list("mlp_layer_types", None, of=str, length=layers)
    if types is None:
        return [bool(one) for one in config.list("moe_layer_freq", [1] * layers, of=int)]
    if not set(types) <= {"dense", "sparse"}:
        raise config.wrong("mlp_layer_types", f"{layers} of dense, sparse")
    return [kind == "sparse" for kind in types]
