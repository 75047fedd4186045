"""What families with experts share: the keys of config.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.base.config.hf import ConfigReader

CORRECTION_BIAS = "gate.e_score_correction_bias"
GROUPS, CHOSEN = ("num_expert_group",), ("num_experts_per_token",)
"""Other names of two keys."""
BIAS_BESIDE = "e_score_correction_bias"
SCORE_KEYS = (
    *("scoring_func", "score_function", "score_func"),
    *("moe_router_activation_func", "moe_router_activation"),
)
"""What families call the function that makes scores of logits, where they state it."""
OTHER_NAMES = {"sigmoid": ("noaux_tc",)}
"""Of scores: DeepSeek-V3's choice by scores and a bias stands for both."""


def sparse_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers have experts, by Qwen's keys: every `decoder_sparse_step`-th but those of
    `mlp_only_layers`."""
    step = config.int("decoder_sparse_step", 1, ge=1)
    dense = config.list("mlp_only_layers", [], of=int)
    return [(i + 1) % step == 0 and i not in dense for i in range(layers)]


def dense_first(
    config: ConfigReader, layers: int, *, default: int = 0, every: int = 1
) -> list[bool]:
    """Which layers have experts, by DeepSeek's key: every `every`-th from `first_k_dense_replace`
    on."""
    first = config.int("first_k_dense_replace", default, ge=0)
    return [i >= first and i % every == 0 for i in range(layers)]


def sparse_by_type(config: ConfigReader, layers: int, *, dense: int = 0) -> list[bool]:
    """Which layers have experts, by `mlp_layer_types`; without it all but the first ones, `dense`
    of them unless `first_k_dense_replace` says."""
    types = config.list("mlp_layer_types", None, of=str, length=layers)
    if types is None:
        return dense_first(config, layers, default=dense)
    if not set(types) <= {"dense", "sparse"}:
        raise config.wrong("mlp_layer_types", f"{layers} of dense, sparse")
    return [kind == "sparse" for kind in types]


def feed_forwards(mixture: MixtureSpec, sparse: Iterable[bool]) -> tuple[FeedForwardSpec, ...]:
    """The mixture in layers that are `sparse`, a dense MLP in the others."""
    return tuple(mixture if is_sparse else GATED_MLP for is_sparse in sparse)


def divided(config: ConfigReader, key: str, shared: int, inner: int) -> int:
    """`shared`, which must be that of a whole number of experts."""
    if shared % inner:
        raise config.wrong(key, f"a multiple of moe_intermediate_size ({inner}), not {shared}")
    return shared


def scored_by(config: ConfigReader, score: str) -> str:
    """The only scores that a family's routers have; if the config states others, it is refused."""
    for key in SCORE_KEYS:
        config.choice(key, (score, *OTHER_NAMES.get(score, ())), score)
    return score


def routed_mixture(
    config: ConfigReader, *, grouped: bool = True, score: str = "softmax"
) -> MixtureSpec:
    """The experts of DeepSeek's models: shared experts without a gate. `grouped`: chosen among the
    groups whose best expert is highest."""
    aliases = ("num_experts", "num_local_experts")
    experts = config.int("n_routed_experts", ge=1, aliases=aliases)
    groups = config.int("n_group", 1, aliases=GROUPS, ge=1, le=64) if grouped else 1
    if experts % groups:
        raise config.wrong("n_group", f"a divisor of n_routed_experts ({experts})")
    inner = config.int("moe_intermediate_size", ge=1)
    shared = config.int("n_shared_experts", 0, ge=0, aliases=("num_shared_experts",))
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", aliases=CHOSEN, ge=1, le=experts),
            score=scored_by(config, score),
            scale=config.float("routed_scaling_factor", 1.0),
            groups=groups,
            kept_groups=config.int("topk_group", 1, ge=1, le=groups) if groups > 1 else 1,
        ),
        inner=inner,
        shared=SharedSpec(inner=inner * shared) if shared else None,
    )


def sigmoid_mixture(
    config: ConfigReader, *, bias_name: str = CORRECTION_BIAS, bias_optional: bool = False
) -> MixtureSpec:
    """The experts of DeepSeek-V3 and of those who followed it: sigmoid scores, a bias that only
    chooses, and groups by their best two. `bias_name`: where it lies in the layer's module."""
    if not bias_optional:
        config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    mixture = routed_mixture(config, score="sigmoid")
    router = replace(
        mixture.router,
        renormalize=config.bool("norm_topk_prob", True, aliases=("moe_renormalize",)),
        group_score="top2",
        bias_name=bias_name,
        bias_optional=bias_optional,
    )
    return replace(mixture, router=router)


def draft_layers(config: ConfigReader, layers: int) -> tuple[str, ...]:
    """Patterns of the tensors of layers behind the last, which only draft tokens
    (`num_nextn_predict_layers`)."""
    drafts = config.int("num_nextn_predict_layers", 0, ge=0)
    return tuple(rf"model\.layers\.{layers + i}\..*" for i in range(drafts))
