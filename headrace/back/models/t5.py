"""T5 (Raffel et al. 2020): relative position biases shared by a stack's layers, scores that are not
scaled, root mean square norms, no biases of linear layers; gated MLPs since version 1.1 (Flan-T5,
mT5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.cross_attention import CrossAttentionSpec
from headrace.back.layers.mlp import (
    FeedForwardSpec,
    GatedMLP,
    GatedMLPSpec,
    PlainMLP,
    PlainMLPSpec,
)
from headrace.back.layers.norm import RMS
from headrace.back.layers.position_bias import RelativeBias
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.crossing_layer import CrossLayerSpec
from headrace.back.models.encoder import (
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    TokenLayer,
    WholeBranch,
)
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.back.parallel.shard import Part
from headrace.base.config.hf import ConfigReader

NAMES = AttentionNames(module="layer.0.SelfAttention", query="q", key="k", value="v", out="o")
CROSS_NAMES = ("layer.1.EncDecAttention", "q", "k", "v", "o")
BIAS = "layer.0.SelfAttention.relative_attention_bias"
IGNORED = (
    r"(encoder|decoder)\.embed_tokens\.weight",
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
HEAD = r"lm_head\.weight"


@dataclass(frozen=True, kw_only=True)
class T5Form:
    """What tells the family's members apart. `scaled`: logits of a tied head are multiplied with
    width ** -0.5; `shared_bias`: a stack's layers share that of the first; `feed_forward`: of a
    layer by the config, its stack and number, and what T5 calls the module; `reads`: what makes the
    attention of the encoder's layers, where it is another."""

    scaled: bool
    shared_bias: bool = True
    feed_forward: Callable[[ConfigReader, str, int, str], FeedForwardSpec] | None = None
    reads: Callable[[Scope], TokenLayer] | None = None

    def feed_forward_of(
        self, config: ConfigReader, stack: str, layer: int, name: str
    ) -> FeedForwardSpec:
        """That of a layer."""
        if self.feed_forward is None:
            return _feed_forward(config, name)
        return self.feed_forward(config, stack, layer, name)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """T5ForConditionalGeneration. Version 1.1 and later do not scale, which a config says by a key
    of its own or, older, by untied embeddings."""
    tied = config.bool("tie_word_embeddings", True)
    return build_t5(scope, config, T5Form(scaled=config.bool("scale_decoder_outputs", tied)))


def build_t5(scope: Scope, config: ConfigReader, form: T5Form) -> EncoderDecoder:
    """A member of the family."""
    sizes = _sizes(config)
    tied = config.bool("tie_word_embeddings", True)

    def biases(stack: str) -> Biases:
        at, both = scope / stack / "block", stack == "encoder"
        return Biases(at, config, sizes, form, both_ways=both)

    encoder_biases = None if form.reads else biases("encoder")
    decoder_biases = biases("decoder")
    return EncoderDecoder(
        scope,
        EncoderDecoderSpec(
            sizes=sizes,
            encoder_layers=config.int("num_layers", ge=1),
            encoder_layer=lambda at, i: _encoder_layer(
                at,
                config,
                encoder_biases.of(i) if encoder_biases else None,
                form.feed_forward_of(config, "encoder", i, "layer.1.DenseReluDense"),
                form.reads,
            ),
            layers=tuple(
                _layer(
                    scope,
                    sizes,
                    decoder_biases.of(i),
                    form.feed_forward_of(config, "decoder", i, "layer.2.DenseReluDense"),
                )
                for i in range(sizes.layers)
            ),
            norm=RMS,
            encoder=StackSpec(stack="encoder", layers="block", norm="final_layer_norm"),
            decoder=StackSpec(
                stack="decoder",
                layers="block",
                norm="final_layer_norm",
                norm_scale=sizes.width**-0.5 if form.scaled else 1.0,
            ),
            prefix="",
            head=None if tied else "lm_head",
            ignored=(*IGNORED, HEAD) if tied and form.scaled else IGNORED,
        ),
    )


class Biases:
    """The position biases of a stack, which lie in its first layer, or one in each."""

    def __init__(
        self,
        scope: Scope,
        config: ConfigReader,
        sizes: DecoderSizes,
        form: T5Form,
        *,
        both_ways: bool,
    ) -> None:
        self._scope, self._sizes, self._shared = scope, sizes, form.shared_bias
        self._both_ways = both_ways
        self._buckets = config.int("relative_attention_num_buckets", 32, ge=4)
        self._distance = config.int(
            "relative_attention_max_distance", 128, ge=self._buckets, le=1 << 16
        )
        self._first = self._bias_of(0)

    def of(self, layer: int) -> RelativeBias:
        """That of a layer."""
        return self._first if self._shared or layer == 0 else self._bias_of(layer)

    def _bias_of(self, layer: int) -> RelativeBias:
        heads = Part("heads", self._sizes.heads, self._sizes.heads)
        return RelativeBias(
            self._scope / str(layer) / BIAS,
            heads,
            buckets=self._buckets,
            max_distance=self._distance,
            both_ways=self._both_ways,
        )


def _layer(
    scope: Scope, sizes: DecoderSizes, bias: RelativeBias, feed_forward: FeedForwardSpec
) -> CrossLayerSpec:
    heads = {"width": sizes.width, "heads": sizes.heads, "head_dim": sizes.head_dim, "scale": 1.0}
    return CrossLayerSpec(
        attention=AttentionSpec(
            **heads, kv_heads=sizes.heads, rope=None, position_bias=bias, names=NAMES
        ),
        cross=CrossAttentionSpec(
            **heads, source=sizes.width, span=scope.encoder_tokens, bias=False, names=CROSS_NAMES
        ),
        feed_forward=feed_forward,
        norms=("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"),
        post=False,
    )


def encoder_layers(scope: Scope, config: ConfigReader, form: T5Form) -> list[EncoderLayer]:
    """Those of the encoder alone, below `scope`."""
    biases = Biases(scope, config, _sizes(config), form, both_ways=True)
    count = config.int("num_layers", ge=1)
    spec = _feed_forward(config, "layer.1.DenseReluDense")
    return [_encoder_layer(scope / str(i), config, biases.of(i), spec) for i in range(count)]


def encoder_sizes(config: ConfigReader) -> EncoderSizes:
    """Those of the encoder."""
    sizes = _sizes(config)
    same = ("vocabulary", "width", "inner", "heads", "kv_heads", "head_dim", "eps", "activation")
    return EncoderSizes(
        **{name: getattr(sizes, name) for name in same}, layers=config.int("num_layers", ge=1)
    )


def _encoder_layer(
    scope: Scope,
    config: ConfigReader,
    bias: RelativeBias | None,
    spec: FeedForwardSpec,
    reads: Callable[[Scope], TokenLayer] | None = None,
) -> EncoderLayer:
    encoder = encoder_sizes(config)
    mlp = spec.build(scope, encoder.feed_forward)
    branch = mlp if isinstance(mlp, GatedMLP | PlainMLP) else WholeBranch(mlp)
    if reads is not None:
        attention = reads(scope)
    else:
        attention = SpanAttentionLayer(
            scope / NAMES.module,
            encoder,
            names=("q", "k", "v"),
            out="o",
            bias=False,
            scale=1.0,
            position_bias=bias,
        )
    before, before_mlp = (
        RMS.build(scope / f"layer.{i}.layer_norm", encoder.width, eps=encoder.eps) for i in range(2)
    )
    return EncoderLayer(
        attention=attention, mlp=branch, before_attention=before, before_mlp=before_mlp
    )


def _feed_forward(config: ConfigReader, name: str) -> GatedMLPSpec | PlainMLPSpec:
    if _activation(config)[0]:
        return GatedMLPSpec(name=name, gate="wi_0", up="wi_1", down="wo")
    return PlainMLPSpec(name=name, up="wi", down="wo")


def _activation(config: ConfigReader) -> tuple[bool, str]:
    """Whether MLPs are gated, and by what."""
    known = {**{f"gated-{name}": name for name in PLAIN_ACTIVATIONS}, **PLAIN_ACTIVATIONS}
    stated = config.choice("feed_forward_proj", known, "relu")
    if stated == "gated-gelu":
        return True, "gelu_tanh"
    return stated.startswith("gated-"), PLAIN_ACTIVATIONS[stated.removeprefix("gated-")]


def _sizes(config: ConfigReader) -> DecoderSizes:
    heads = config.int("num_heads", ge=1)
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=config.int("d_model", ge=1),
        inner=config.int("d_ff", ge=1),
        layers=config.int("num_decoder_layers", config.int("num_layers", ge=1), ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=config.int("d_kv", ge=1),
        eps=config.float("layer_norm_epsilon", 1e-6, ge=0.0),
        activation=_activation(config)[1],
        tied=config.bool("tie_word_embeddings", True),
    )
