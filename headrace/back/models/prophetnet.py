"""ProphetNet (Qi et al. 2020): an encoder-decoder whose decoder has a second
vector of each token, which knows its place and not its word, and guesses the next one. Further
guesses, of the tokens behind that, are not read. T tokens, E hidden size."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.embedding.op import OP, Embedding, EmbeddingProblem
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.cross_attention import CrossAttentionSpec
from headrace.back.layers.linear import Branch, total
from headrace.back.layers.mlp import FeedForwardPlace, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER, BlockNorm, NormSpec
from headrace.back.layers.positions import LearnedPositions, Positions
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.two_stream_attention import TwoStreamAttention, TwoStreamSpec
from headrace.back.models.bart import EPS
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.decoder_layer import Stream
from headrace.back.models.encoder import EncoderLayer, EncoderSizes, SpanAttentionLayer
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.base.config.hf import ConfigReader

CROSS = ("cross_attn", "query_proj", "key_proj", "value_proj", "out_proj")
NAMES = AttentionNames(
    module="self_attn", query="query_proj", key="key_proj", value="value_proj", out="out_proj"
)
MLP = PlainMLPSpec(name="feed_forward", up="intermediate", down="output", bias=True)
NORMS = ("self_attn_layer_norm", "cross_attn_layer_norm", "feed_forward_layer_norm")
EMBEDDING_NORM = "embeddings_layer_norm"
IGNORED = (r"prophetnet\.(encoder|decoder)\.word_embeddings\.weight",)


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """ProphetNetForConditionalGeneration."""
    unused = config.int("pad_token_id", 0, ge=0) + 1
    rows = config.int("max_position_embeddings", 512, ge=unused + 2)
    sizes = _sizes(config, "decoder")
    read = _sizes(config, "encoder")
    start = TwoStreamStart(
        rows=rows, unused=unused, eps=sizes.eps, guesses=config.int("ngram", 2, ge=1)
    )
    layers = tuple(
        TwoStreamLayerSpec(attention=_attention(config, sizes, rows), start=start, first=i == 0)
        for i in range(sizes.layers)
    )
    encoder = EncoderSizes(
        **{name: getattr(read, name) for name in ("vocabulary", "width", "inner", "layers")},
        **{name: getattr(read, name) for name in ("heads", "kv_heads", "head_dim", "eps")},
        activation=read.activation,
    )
    tied = config.bool("tie_word_embeddings", True)
    return EncoderDecoder(
        scope,
        EncoderDecoderSpec(
            sizes=sizes,
            encoder_layers=read.layers,
            encoder_layer=lambda at, i: _encoder_layer(at, encoder),
            layers=layers,
            norm=LAYER,
            encoder=StackSpec(
                stack="encoder",
                embedding_norm=EMBEDDING_NORM,
                positions=LearnedPositions(
                    name="position_embeddings", rows=rows - unused, unused=unused
                ),
            ),
            decoder=StackSpec(stack="decoder", positions=start),
            prefix="prophetnet",
            shared="word_embeddings",
            head=None if tied else "lm_head",
            before_head=lambda at: SecondVectors(),
            ignored=(*IGNORED, r"lm_head\.weight") if tied else IGNORED,
        ),
    )


class SecondVectors:
    """Of both vectors of each token, [T, 2, E], the second ones."""

    def norm(self, x_T2E: torch.Tensor, /) -> torch.Tensor:
        """See the class."""
        return x_T2E[:, 1]


@dataclass(frozen=True, kw_only=True)
class TwoStreamStart:
    """What the decoder's layers begin with. `rows`: of the table of positions, of which no text
    reaches the first `unused`; `guesses`: vectors of guesses, of which the last is the next
    token's."""

    rows: int
    unused: int
    guesses: int
    eps: float
    built: list[_Start] = field(default_factory=list)

    def build(self, scope: Scope, width: int) -> Positions:
        """See PositionsSpec: places of first vectors; layers find the rest in `built`."""
        self.built.append(_Start(scope, self, width))
        return self.built[-1]


class _Start:
    """`lookup(positions_T)`: of first vectors; `begin`: both, normed."""

    def __init__(self, scope: Scope, spec: TwoStreamStart, width: int) -> None:
        self.lookup: Embedding = not_loaded
        self._second: Embedding = not_loaded
        self._scope, self._spec, self._width = scope, spec, width
        self._rows = scope.param("position_embeddings.weight", (spec.rows, width))
        self._guesses = scope.param("ngram_embeddings.weight", (spec.guesses, width))
        self._norm = LAYER.build(scope / EMBEDDING_NORM, width, eps=spec.eps)
        scope.on_finish(self._finish)

    def begin(self, stream: Stream, batch: Batch) -> torch.Tensor:
        """x_T2E of the words and places of first vectors, and the places of second ones."""
        first_TE = total(stream[0])
        assert first_TE is not None, "places are added"
        both = (first_TE + stream[1], self._second(batch.positions_T))
        return self._norm.norm(torch.stack(both, dim=1))

    def _finish(self) -> None:
        rows_PE, guesses = self._rows.take(), self._guesses.take()
        second_PE = rows_PE[self._spec.unused + 1 :] + guesses[-1]
        self.lookup, self._second = (
            self._bound(table) for table in (rows_PE[self._spec.unused :], second_PE)
        )

    def _bound(self, table_PE: torch.Tensor) -> Embedding:
        facts = {"device": self._scope.kind, "dtype": self._scope.dtype}
        problem = EmbeddingProblem(**facts, rows=len(table_PE), width=self._width)
        lookup: Embedding = self._scope.bind(OP, problem, table_PE.contiguous())
        return lookup


@dataclass(frozen=True, kw_only=True)
class TwoStreamLayerSpec:
    """One decoder layer; the first makes both vectors of each token."""

    attention: TwoStreamSpec
    start: TwoStreamStart
    first: bool

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norm: NormSpec
    ) -> TwoStreamLayer:
        """See CrossingLayerSpec."""
        return TwoStreamLayer(scope, cache, self, sizes, norm)


class TwoStreamLayer:
    """See CrossingLayer; its stream is [T, 2, E]. Its caches are `cache` and the one behind it."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: TwoStreamLayerSpec,
        sizes: DecoderSizes,
        norm: NormSpec,
    ) -> None:
        self._start = spec.start.built[-1] if spec.first else None
        attention = spec.attention.attention
        self._attention = TwoStreamAttention(scope, cache, spec.attention)
        cross = CrossAttentionSpec(
            width=sizes.width,
            source=sizes.width,
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            scale=attention.scale,
            span=scope.encoder_tokens,
            bias=True,
            names=CROSS,
        )
        self.cross = cross.build(scope, cache + 1)
        self._norms = [norm.build(scope / name, sizes.width, eps=sizes.eps) for name in NORMS]
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=False
        )
        self._feed_forward = MLP.build(scope, place)
        self.kv_forms: tuple[CacheForm, ...] = (*self._attention.kv_forms, self.cross.kv_form)

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See CrossingLayer."""
        x_T2E = stream[1] if self._start is None else self._start.begin(stream, batch)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self._attention.queries(x_T2E, batch, at_N)
        if after is not None and at_N is not None:
            x_T2E, batch = x_T2E.index_select(0, at_N), after
        own, crossed, fed = self._norms
        x_T2E = _summed(own, self._attention.attend(handed, batch), x_T2E)
        read = [
            total(self.cross.attend_into(x_TE, x_TE, batch))
            for x_TE in (one.contiguous() for one in x_T2E.unbind(1))
        ]
        first_TE, second_TE = read
        assert first_TE is not None and second_TE is not None, "a branch that gives its sum"
        x_T2E = crossed.norm(x_T2E + torch.stack((first_TE, second_TE), dim=1))
        x_TX = x_T2E.flatten(0, 1)
        return None, _summed(fed, self._feed_forward.forward_into(x_TX, x_TX), x_T2E)


def _summed(norm: BlockNorm, branch: Branch, x_T2E: torch.Tensor) -> torch.Tensor:
    """The norm of the sum with a branch of all vectors, [2T, E]."""
    y_TX = total(branch)
    assert y_TX is not None, "a branch that gives its sum"
    return norm.norm(x_T2E + y_TX.view(x_T2E.shape))


def _attention(config: ConfigReader, sizes: DecoderSizes, rows: int) -> TwoStreamSpec:
    buckets = config.int("num_buckets", 32, ge=2)
    return TwoStreamSpec(
        attention=AttentionSpec(
            width=sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=None,
            qkv_bias=True,
            out_bias=True,
            names=NAMES,
        ),
        buckets=buckets,
        max_distance=config.int("relative_max_distance", 128, ge=buckets, le=1 << 16),
        reach=rows,
    )


def _encoder_layer(scope: Scope, sizes: EncoderSizes) -> EncoderLayer:
    attention, after = (LAYER.build(scope / name, sizes.width, eps=EPS) for name in NORMS[::2])
    mlp = MLP.build(scope, sizes.feed_forward)
    assert isinstance(mlp, PlainMLP), mlp
    return EncoderLayer(
        attention=SpanAttentionLayer(scope / NAMES.module, sizes, names=CROSS[1:4], out=CROSS[4]),
        after_attention=attention,
        mlp=mlp,
        after_mlp=after,
    )


def _sizes(config: ConfigReader, half: str) -> DecoderSizes:
    width = config.int("hidden_size", ge=1)
    heads = config.int(f"num_{half}_attention_heads", ge=1)
    if width % heads:
        raise config.wrong(f"num_{half}_attention_heads", f"a divisor of hidden_size ({width})")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int(f"{half}_ffn_dim", ge=1),
        layers=config.int(f"num_{half}_layers", ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=PLAIN_ACTIVATIONS[
            config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu")
        ],
        tied=config.bool("tie_word_embeddings", True),
    )
