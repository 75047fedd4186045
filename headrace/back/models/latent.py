"""What families with multi-head latent attention share: the keys of config.json."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.indexer import IndexerSpec
from headrace.back.layers.latent_attention import LatentAttentionSpec
from headrace.back.layers.rope import RopeSpec, read_rope, yarn_factor
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import DecoderSizes
from headrace.base.config.hf import ConfigReader

NORM_EPS = 1e-6
"""Of the norms of the latents, in all published models: not the model's own."""


def read_latent_attention(
    scope: Scope,
    config: ConfigReader,
    sizes: DecoderSizes,
    *,
    layout: str = "half",
    layer_type: str | None = None,
) -> LatentAttentionSpec:
    """The attention of every layer. `layout` of the rotation: see kernels/rope; `layer_type`: whose
    rotation it is, where layers have their own."""
    rotary = config.int("qk_rope_head_dim", ge=2)
    if rotary % 2:
        raise config.wrong("qk_rope_head_dim", f"an even number, not {rotary}")
    nope = config.int("qk_nope_head_dim", ge=1)
    bias = config.bool("attention_bias", False)
    q_rank = config.int("q_lora_rank", None, ge=1)
    if bias and q_rank is None:
        raise config.wrong("attention_bias", "false where q_lora_rank is absent")
    rope = read_rope(
        config,
        head_dim=rotary,
        max_positions=scope.max_positions,
        whole=True,
        layer_type=layer_type,
    )
    return LatentAttentionSpec(
        width=sizes.width,
        heads=sizes.heads,
        q_rank=q_rank,
        rank=config.int("kv_lora_rank", ge=1),
        nope=nope,
        values=config.int("v_head_dim", sizes.width // sizes.heads, ge=1),
        scale=(nope + rotary) ** -0.5 * _scale_of(config, rope),
        rope=replace(rope, layout=layout),
        eps=NORM_EPS,
        down_bias=bias,
        out_bias=bias,
    )


def read_indexer(
    config: ConfigReader,
    attention: LatentAttentionSpec,
    *,
    layout: str,
    own_queries: bool = False,
) -> IndexerSpec:
    """The indexer beside this attention, by DeepSeek-V3.2's keys. `layout`: of its own rotation,
    whose angles are the attention's; `own_queries`: see IndexerSpec."""
    if attention.q_rank is None and not own_queries:
        raise config.wrong("q_lora_rank", "a number: the indexer reads that projection")
    rotary = attention.rope.rotary_dim
    return IndexerSpec(
        heads=config.int("index_n_heads", ge=1),
        dim=config.int("index_head_dim", ge=rotary),
        top_k=config.int("index_topk", ge=1),
        rope=replace(attention.rope, layout=layout),
        own_queries=own_queries,
    )


def _scale_of(config: ConfigReader, rope: RopeSpec) -> float:
    """Scaled rotations also scale the scores where the config says `mscale_all_dim` (YaRN, section
    3.4, on keys and queries)."""
    if rope.kind == "default":
        return 1.0
    section = config.section("rope_parameters") or config.section("rope_scaling")
    assert section is not None, "a scaling was read from it"
    weight = section.float("mscale_all_dim", 0.0)
    return yarn_factor(section.float("factor", ge=1.0), weight) ** 2 if weight else 1.0
