"""Command A with experts: Command R7B's layers, the first ones dense, the others with experts and
perhaps shared ones, which are added to the chosen or averaged with them."""

from __future__ import annotations

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.mlp import FeedForwardSpec, GatedMLPSpec, SummedSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.norm import LAYER_NO_BIAS, PARALLEL, RMS
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.back.models.moe import sparse_by_type
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Cohere2MoeForCausalLM. Layers without a window have no rope, but for dense ones where all of
    these have no window."""
    sizes = read_sizes(config, eps=1e-5, tied=True)
    prefix = config.int("prefix_dense_sliding_window_pattern", 1, ge=1)
    windows = _windows(config, sizes.layers, prefix)
    rope = read_rope(
        config, head_dim=sizes.head_dim, max_positions=scope.max_positions, layout="pairs"
    )
    bias = config.bool("attention_bias", False)
    dense = GatedMLPSpec(inner=config.int("prefix_dense_intermediate_size", sizes.inner, ge=1))
    experts = _experts(config, sizes.inner)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **plain_attention(sizes),
                rope=rope if window or (prefix == 1 and not is_sparse) else None,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
            ),
            placement=PARALLEL,
            feed_forward=experts if is_sparse else dense,
        )
        for window, is_sparse in zip(windows, sparse_by_type(config, sizes.layers), strict=True)
    )
    has_rms = config.float("rms_norm_eps", None) is not None
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS if has_rms else LAYER_NO_BIAS,
            logits_scale=config.float("logit_scale", 0.0625, ge=0.0),
        ),
    )


def _windows(config: ConfigReader, layers: int, prefix: int) -> tuple[int | None, ...]:
    """Dense layers and those with experts count their patterns apart."""
    rest = config.int("sliding_window_pattern", 4, aliases=("_sliding_window_pattern",), ge=1)
    first = config.int("first_k_dense_replace", 0, ge=0)

    def sliding(layer: int) -> bool:
        pattern, place = (prefix, layer) if layer < first else (rest, layer - first)
        return (place + 1) % pattern != 0

    window = config.int("sliding_window", 4096, ge=1)
    return read_windows(config, layers, window=window, sliding=sliding)


def _experts(config: ConfigReader, inner: int) -> FeedForwardSpec:
    experts = config.int("num_experts", 8, ge=1)
    score = config.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    how = config.choice("shared_expert_combination_strategy", ("average", "sum"), "average")
    shared = inner * config.int("num_shared_experts", 0, ge=0)
    share = 0.5 if shared and how == "average" else 1.0
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 2, ge=1, le=experts),
            score=score,
            softmax_chosen=score == "softmax",
            renormalize=score == "sigmoid" and config.bool("norm_topk_prob", True),
            scale=share,
        ),
        inner=inner,
        shared=SharedSpec(inner=shared) if shared and share == 1.0 else None,
    )
    if share == 1.0:
        return mixture
    beside = GatedMLPSpec(name="mlp.shared_experts", inner=shared, down_scale=share)
    return SummedSpec(experts=mixture, beside=beside)
