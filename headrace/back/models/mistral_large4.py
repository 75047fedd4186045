"""Mistral Large 4: latent attention over positions that an indexer chooses, with queries that grow
with the logarithm of their position. Every fourth layer does not rotate, the others do by learned
frequencies, and layers may read the latents of one before them; softmax routing (transformers 5.23,
modeling_mistral_large4)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.indexer import IndexerSpec, Selection
from headrace.back.layers.latent_attention import LatentAttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec
from headrace.back.layers.query_scale import LearnedLogScale
from headrace.back.layers.rope import LearnedStretch
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.glm5_next import STILL
from headrace.back.models.latent import read_indexer, read_latent_attention
from headrace.back.models.mixtral import LAYOUT
from headrace.back.models.moe import feed_forwards, routed_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader
from headrace.base.config.index_choices import shared_layers
from headrace.base.config.latent_sources import latent_sources

EVERY = 4
"""Of so many layers the last does not rotate, unless the config says."""
BASE = "model"
VISION = r"(vision_encoder|vision_language_adapter|pre_mm_projector_norm|patch_merger)\..*"
IGNORED = (r".*mtp_dspark\..*", VISION)
RENAMED = (
    (r"^tok_embeddings\.", f"{BASE}.embed_tokens."),
    (r"^norm\.", f"{BASE}.norm."),
    (r"^lerope\.", f"{BASE}.rotary_emb."),
    (r"^layers\.", f"{BASE}.layers."),
    (r"^output\.", "lm_head."),
    (r"(layers\.\d+)\.attention_norm\.", r"\1.input_layernorm."),
    (r"(layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"(layers\.\d+)\.attention\.", r"\1.self_attn."),
    (r"(layers\.\d+)\.feed_forward\.", r"\1.mlp."),
    (r"(layers\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."),
    (r"\.self_attn\.wq\.", ".self_attn.q_proj."),
    (r"\.self_attn\.wo\.", ".self_attn.o_proj."),
    (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
    (r"\.wkv_b\.", ".kv_b_proj."),
    (r"\.kv_a_norm\.", ".kv_a_layernorm."),
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
    (r"\.(mlp|shared_experts)\.w1\.", r".\1.gate_proj."),
    (r"\.(mlp|shared_experts)\.w2\.", r".\1.down_proj."),
    (r"\.(mlp|shared_experts)\.w3\.", r".\1.up_proj."),
)
"""What its checkpoints, in Mistral's own names, call the tensors."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """The text part of MistralLarge4ForConditionalGeneration."""
    sizes = read_sizes(config, eps=1e-5)
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=feed_forward)
        for mixer, feed_forward in zip(
            _mixers(scope, config, sizes), feed_forwards(_mixture(config), sparse), strict=True
        )
    )
    softcap = config.float("final_logit_softcapping", 30.0, ge=1.0)
    names = {"ignored": IGNORED, "renamed": RENAMED}
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, logits_softcap=softcap, **names))


def _mixture(config: ConfigReader) -> MixtureSpec:
    mixture = routed_mixture(config)
    router = replace(mixture.router, renormalize=True, group_score="top2")
    return replace(mixture, router=router, layout=LAYOUT)


def _mixers(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes
) -> tuple[LatentAttentionSpec, ...]:
    """Of every layer. The id of a layer's latents is the number of caches before them."""
    rotates = _rotating(config, sizes.layers)
    shared = shared_layers(config, sizes.layers)
    sources = latent_sources(config, sizes.layers)
    kinds = _attentions(scope, config, sizes)
    mixers: list[LatentAttentionSpec] = []
    first, caches = list[int](), 0
    for i, source in enumerate(sources):
        attention, indexer = kinds[rotates[i]]
        if rotates[source] != rotates[i]:
            raise config.wrong("kv_source_layers", f"for layer {i} one that rotates as it does")
        owns = source == i
        indexer = replace(indexer, shared=shared[i])
        mixers.append(replace(attention, indexer=indexer, source=None if owns else first[source]))
        first.append(caches)
        caches += owns + (not shared[i])
    return tuple(mixers)


def _attentions(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes
) -> dict[bool, tuple[LatentAttentionSpec, IndexerSpec]]:
    """Those that rotate and those that do not, each with its indexer."""
    attention = replace(
        read_latent_attention(scope, config, sizes, layout="pairs"),
        eps=sizes.eps,
        query_scale=LearnedLogScale("softmax_scaling"),
    )
    indexer = read_indexer(config, attention, layout="pairs", own_queries=True)
    indexer = replace(indexer, selection=Selection())
    pairs = len(attention.rope.frequencies)
    stretch = LearnedStretch(scope / BASE, "rotary_emb.alpha", pairs)
    rope = replace(attention.rope, stretch=stretch)
    still = replace(attention.rope, frequencies=(0.0,) * pairs, attention_factor=1.0)
    unturned = replace(attention, rope=STILL, nope=attention.nope + attention.rope.rotary_dim)
    return {
        True: (replace(attention, rope=rope), replace(indexer, rope=rope)),
        False: (unturned, replace(indexer, rope=still)),
    }


def _rotating(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers rotate: those with 1 in `no_rope_layers`."""
    stated = config.list("no_rope_layers", None, of=int)
    if stated is None:
        every = config.int("no_rope_layer_interval", EVERY, ge=1)
        return [(i + 1) % every != 0 for i in range(layers)]
    if len(stated) < layers or not set(stated) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"at least {layers} of 0, 1")
    return [one == 1 for one in stated[:layers]]
