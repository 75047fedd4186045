"""DeepSeek V4: attention over windows and compressed caches, in a residual of several streams, and
experts in every layer, those of the first layers stated by a table of the tokens."""

from __future__ import annotations

from headrace.back.kernels.route.op import SQRT_SOFTPLUS
from headrace.back.layers.compressed_attention import CompressedAttentionSpec
from headrace.back.layers.compressed_entries import CompressionSpec, GroupIndexSpec
from headrace.back.layers.hyper_connections import HyperSpec
from headrace.back.layers.moe.hashed import HashedMixtureSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    read_sizes,
)
from headrace.back.models.hyper_layer import HyperLayerSpec
from headrace.back.models.mixtral import LAYOUT
from headrace.base.config.hf import ConfigReader

WINDOW = "sliding_attention"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
GROUPS = {SPARSE: 4, HEAVY: 128}
RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
"""As the first configs list the kinds of layers."""
HASHED, ROUTED = "hash_moe", "moe"
SCORES = {"sqrtsoftplus": SQRT_SOFTPLUS, "sigmoid": "sigmoid", "softmax": "softmax"}
NAMES = DecoderNames(head="head")
RENAMED = (
    (r"^(embed|layers|norm|hc_head)(?=[._])", r"model.\1"),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^model\.hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.attn\.kv_norm\.", ".attn.norm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_attn_(fn|base|scale)$", r".attn_hc.\1"),
    (r"\.hc_ffn_(fn|base|scale)$", r".ffn_hc.\1"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
DRAFTS = (r"(model\.)?mtp\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekV4ForCausalLM."""
    inner = config.int("moe_intermediate_size", ge=1, aliases=("intermediate_size",))
    sizes = read_sizes(config, inner=inner, kv_heads=1)
    streams = streams_of(config, sizes.eps)
    plain, hashed = experts_of(config, inner, bias=True), experts_of(config, inner, bias=False)
    layers = tuple(
        HyperLayerSpec(
            mixer=_attention(scope, config, sizes, kind),
            feed_forward=plain if experts == ROUTED else None,
            of_tokens=None
            if experts == ROUTED
            else HashedMixtureSpec(mixture=hashed, vocabulary=sizes.vocabulary),
            streams=streams,
        )
        for kind, experts in zip(
            _kinds(config, sizes.layers), _expert_kinds(config, sizes.layers), strict=True
        )
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            streams=streams,
            names=NAMES,
            renamed=RENAMED,
            ignored=DRAFTS,
        ),
    )


def streams_of(config: ConfigReader, eps: float) -> HyperSpec:
    """The residual's streams."""
    return HyperSpec(
        streams=config.int("hc_mult", 4, ge=1, le=16),
        eps=config.float("hc_eps", 1e-6, ge=0.0),
        norm_eps=eps,
        iterations=config.int("hc_sinkhorn_iters", 20, ge=1),
    )


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, kind: str
) -> CompressedAttentionSpec:
    groups = config.int("o_groups", 8, ge=1)
    if sizes.heads % groups:
        raise config.wrong("o_groups", f"a divisor of num_attention_heads ({sizes.heads})")
    rope = rope_of(scope, config, sizes, compressed=kind != WINDOW)
    index = GroupIndexSpec(
        heads=config.int("index_n_heads", 64, ge=1),
        dim=config.int("index_head_dim", 128, ge=rope.rotary_dim),
        top_groups=config.int("index_topk", 512, ge=1),
    )
    over = None
    if kind != WINDOW:
        rates = config.section("compress_rates") or ConfigReader({}, config.where)
        over = CompressionSpec(
            group=rates.int(kind, GROUPS[kind], ge=1),
            series=2 if kind == SPARSE else 1,
            index=index if kind == SPARSE else None,
        )
    return CompressedAttentionSpec(
        width=sizes.width,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        q_rank=config.int("q_lora_rank", 1024, ge=1),
        out_groups=groups,
        out_rank=config.int("o_lora_rank", 1024, ge=1),
        window=config.int("sliding_window", 128, ge=1),
        rope=rope,
        eps=sizes.eps,
        compression=over,
    )


def rope_of(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, *, compressed: bool
) -> RopeSpec:
    """Layers with compressed caches have a base of their own and the stated scaling, which does not
    scale what is rotated."""
    section = config.section("rope_parameters")
    rotary = config.int("qk_rope_head_dim", sizes.head_dim // 8, ge=2, le=sizes.head_dim)
    share = config.float("partial_rotary_factor", rotary / sizes.head_dim, ge=0.0, le=1.0)
    kind = "compress" if compressed else "main"
    if section is None or kind not in section:
        stated = config.raw.get("rope_scaling") or config.raw.get("rope_parameters") or {}
        base = config.float("compress_rope_theta" if compressed else "rope_theta", 10_000.0)
        scaling = {**stated, "attention_factor": 1.0} if compressed else {}
        own = {"partial_rotary_factor": share, "rope_theta": base}
        values = {**config.raw, "rope_scaling": None, "rope_parameters": {**scaling, **own}}
        config = ConfigReader(values, config.where)
    return read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        layer_type=kind,
        default_share=share,
        layout="pairs",
    )


def experts_of(config: ConfigReader, inner: int, *, bias: bool) -> MixtureSpec:
    """Those of a layer; `bias`: its router has one that only chooses."""
    experts = config.int("n_routed_experts", ge=1, aliases=("num_local_experts",))
    shared = config.int("n_shared_experts", 1, ge=0)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 6, ge=1, le=experts),
            score=SCORES[config.choice("scoring_func", SCORES, "sqrtsoftplus")],
            renormalize=True,
            scale=config.float("routed_scaling_factor", 1.5),
            bias_name="gate.bias" if bias else None,
        ),
        inner=inner,
        layout=LAYOUT,
        shared=SharedSpec(inner=inner * shared) if shared else None,
        name="ffn",
        clamp=config.float("swiglu_limit", 10.0, ge=0.0),
    )


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    """By `layer_types`, or `compress_ratios`, or by turns behind two heavily compressed ones."""
    types = config.list("layer_types", None, of=str)
    ratios = config.list("compress_ratios", None, of=int)
    if types is None and ratios is not None:
        if not set(ratios) <= set(RATIOS) or len(ratios) < layers:
            raise config.wrong("compress_ratios", f"{layers} of 0, 4, 128")
        return [RATIOS[one] for one in ratios[:layers]]
    if types is None:
        return [SPARSE if i > 1 and i % 2 else HEAVY for i in range(layers)]
    if len(types) != layers or not set(types) <= {WINDOW, SPARSE, HEAVY}:
        raise config.wrong("layer_types", f"{layers} of {WINDOW}, {SPARSE}, {HEAVY}")
    return list(types)


def _expert_kinds(config: ConfigReader, layers: int) -> list[str]:
    types = config.list("mlp_layer_types", None, of=str)
    if types is None:
        hashed = config.int("num_hash_layers", 3, ge=0)
        return [HASHED if i < hashed else ROUTED for i in range(layers)]
    if len(types) != layers or not set(types) <= {HASHED, ROUTED}:
        raise config.wrong("mlp_layer_types", f"{layers} of {HASHED}, {ROUTED}")
    return list(types)
