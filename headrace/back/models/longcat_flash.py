"""LongCat-Flash: layers of two latent attentions and two dense MLPs each, with experts around the
second half of it, some of which give back what they get (Meituan LongCat team 2025). LongCat-Flash-
Lite's embeddings know the n-grams that end with a token.

T tokens, E hidden size, N tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.hashed_ngrams import HashedNGramSpec
from headrace.back.layers.latent_attention import LatentAttentionSpec, LatentNames
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import add_norm, sum_branches
from headrace.back.layers.mixer import Mixer
from headrace.back.layers.mlp import FeedForwardPlace, GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, read_sizes
from headrace.back.models.decoder_layer import DecoderLayerSpec, Stream
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.ngram_layer import NGramLayerSpec
from headrace.base.config.hf import ConfigReader

DRAFTS = (r"model\.mtp\..*", r"model\.layers\.0\.ngram_embeddings\.word_embeddings\.weight")
"""What only drafts tokens, and the embeddings once more."""
NGRAMS = ((r"^model\.ngram_embeddings\.", "model.layers.0.ngram_embeddings."),)
"""They lie beside the layers."""
HALVES = (0, 1)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """LongcatFlashForCausalLM, LongcatFlashNgramForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    count = config.int("num_layers", sizes.layers, ge=1)
    attention = read_latent_attention(scope, config, sizes, layout="pairs")
    if attention.q_rank is None:
        raise config.wrong("q_lora_rank", "a number")
    attention = replace(
        attention,
        scale=attention.scale * (sizes.width / attention.q_rank) ** 0.5,
        latent_scale=(sizes.width / attention.rank) ** 0.5,
    )
    idle = config.int("zero_expert_num", 0, ge=0)
    mixture = _mixture(config, idle)
    layers: list[DecoderLayerSpec] = [
        ShortcutLayerSpec(attention=attention, mixture=mixture) for _ in range(count)
    ]
    ngrams = _ngrams(config, sizes)
    if ngrams is not None:
        layers[0] = NGramLayerSpec(layer=layers[0], ngrams=ngrams)
    first = mixture.router.experts - idle
    unused = "|".join(str(first + i) for i in range(idle))
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=tuple(layers),
            ignored=(*DRAFTS, rf".*\.mlp\.experts\.({unused})\..*"),
            renamed=NGRAMS if ngrams is not None else (),
        ),
    )


def _ngrams(config: ConfigReader, sizes: DecoderSizes) -> HashedNGramSpec | None:
    """LongCat-Flash-Lite's; None: there are none."""
    ratio = config.float("ngram_vocab_size_ratio", None, ge=1.0)
    if ratio is None:
        return None
    longest = config.int("emb_neighbor_num", ge=2, le=16)
    hashes = config.int("emb_split_num", ge=1)
    if sizes.width % (hashes * (longest - 1)):
        raise config.wrong("emb_split_num", f"such that its n-grams divide {sizes.width}")
    return HashedNGramSpec(
        vocabulary=sizes.vocabulary,
        longest=longest,
        hashes=hashes,
        base=int(ratio * sizes.vocabulary),
        end_id=config.int("eos_token_id", ge=0),
    )


def _mixture(config: ConfigReader, idle: int) -> MixtureSpec:
    experts = config.int("n_routed_experts", ge=1) + idle
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("moe_topk", ge=1, le=experts, aliases=("num_experts_per_tok",)),
            scale=config.float("routed_scaling_factor", 1.0),
            name="router.classifier",
            bias_name="router.e_score_correction_bias",
            idle=idle,
        ),
        inner=config.int("expert_ffn_hidden_size", ge=1, aliases=("moe_intermediate_size",)),
    )


@dataclass(frozen=True, kw_only=True)
class ShortcutLayerSpec:
    """One layer: see ShortcutLayer."""

    attention: LatentAttentionSpec
    mixture: MixtureSpec

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec
    ) -> ShortcutLayer:
        """See DecoderLayerSpec."""
        return ShortcutLayer(scope, cache, self, sizes, norms)


class ShortcutLayer:
    """Attention, MLP, attention, MLP, each behind a norm and added to the residual. The experts
    read what the first MLP reads and are added behind the second."""

    tail: Tail | None = None
    takes_adapters = False

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: ShortcutLayerSpec,
        sizes: DecoderSizes,
        norms: NormSpec,
    ) -> None:
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=True
        )
        eps, width = sizes.eps, sizes.width
        self._before_attention, self._before_mlp = (
            [norms.build(scope / f"{name}.{half}", width, eps=eps) for half in HALVES]
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self._mixers: list[Mixer[Any]] = []
        for half in HALVES:
            names = LatentNames(module=f"self_attn.{half}")
            mixer = replace(spec.attention, names=names).build(scope, cache + half, adds=True)
            self._mixers.append(mixer)
        self.mixer: Mixer[Any] = self._mixers[0]
        self._mlps = [GatedMLPSpec(name=f"mlps.{half}").build(scope, place) for half in HALVES]
        self._mixture = spec.mixture.build(scope, place)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of both attentions."""
        first, second = self._mixers
        return first.kv_forms + second.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = stream
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        x_TE = add_norm(self._before_attention[0], branch_TE, residual_TE)
        handed = self._mixers[0].queries(x_TE, batch)
        branch_TE = self._mixers[0].attend_into(handed, residual_TE, batch)
        x_TE = add_norm(self._before_mlp[0], branch_TE, residual_TE)
        wanted_TE = x_TE if at_N is None else x_TE.index_select(0, at_N)
        around_TE = self._mixture.forward_into(wanted_TE, wanted_TE)
        branch_TE = self._mlps[0].forward_into(x_TE, residual_TE)
        x_TE = add_norm(self._before_attention[1], branch_TE, residual_TE)
        handed = self._mixers[1].queries(x_TE, batch, at_N)
        if after is not None and at_N is not None:
            residual_TE, batch = residual_TE.index_select(0, at_N), after
        branch_TE = self._mixers[1].attend_into(handed, residual_TE, batch)
        x_TE = add_norm(self._before_mlp[1], branch_TE, residual_TE)
        branch_TE = self._mlps[1].forward_into(x_TE, residual_TE)
        return sum_branches(branch_TE, around_TE), residual_TE
