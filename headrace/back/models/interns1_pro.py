"""Intern-S1-Pro (Shanghai AI Laboratory 2026): Qwen 3's decoder with experts that are chosen from
each of several groups, whose rotations are sums of frequencies, and positions in one axis, behind
Qwen3-VL's tower without what that adds to layers (keys and code of the published checkpoint)."""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.back.layers.fourier_rope import FourierSeries
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.tower import VisionTower
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.moe import feed_forwards, sparse_layers
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.back.models.qwen3_vl import THETA, qwen3_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader

BASE = "model.language_model"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InternS1ProForConditionalGeneration."""
    text, vision = parts_of(config)
    sizes = read_sizes(text)
    tower = VisionTower(scope / "model.visual", qwen3_tower(vision), None)
    branches = feed_forwards(_mixture(text), sparse_layers(text, sizes.layers))
    rope = _rope(scope, text, head_dim=sizes.head_dim, kv_heads=sizes.kv_heads)
    inside = replace(scope, base_within=BASE)
    decoder = qwen3_decoder(inside, text, sizes, branches, rope=rope)
    return with_media(scope, decoder, tower)


def _mixture(text: ConfigReader) -> MixtureSpec:
    """Of each group of experts equally many are chosen."""
    mixture = qwen_mixture(text, renormalize=True)
    router, groups = mixture.router, text.int("router_n_groups", 1, ge=-1)
    if groups <= 1:
        return mixture
    for key, count in (("num_experts", router.experts), ("num_experts_per_tok", router.top_k)):
        if count % groups:
            raise text.wrong(key, f"a multiple of router_n_groups ({groups})")
    router = replace(router, groups=groups, kept_groups=groups, group_score="each")
    return replace(mixture, router=router)


def _rope(scope: Scope, text: ConfigReader, *, head_dim: int, kv_heads: int) -> RopeSpec:
    """Of the frequencies only those that turn once within the longest text are summed, or so many
    as are stated."""
    spec = read_rope(
        text, head_dim=head_dim, max_positions=scope.max_positions, default_theta=THETA
    )
    values = text.section("rope_parameters") or text.section("rope_scaling")
    keys = ("fope_init_factor", "fope_sep_head", "num_inv_freq")
    if values is None or all(values.raw.get(key) is None for key in keys):
        return spec
    slowest = 2.0 * math.pi / text.int("max_position_embeddings", ge=1)
    turning = sum(frequency > slowest for frequency in spec.frequencies)
    count = values.int("num_inv_freq", None, ge=1, le=len(spec.frequencies)) or turning
    apart = values.bool("fope_sep_head", False)
    at = scope / BASE / "rotary_emb"
    return replace(spec, series=FourierSeries(at, count=count, heads=kv_heads if apart else 0))
