"""The encoder-decoder that its families share (Vaswani et al. 2017): two stacks over one embedding,
joined by cross-attention.

The encoder reads a request's prompt once, in the request's first step (`Batch.encoder`), and every
decoder layer keeps keys and values of its outputs in a cross cache; from then on the decoder runs
as decoders do. A family file reads its config, states what differs (`EncoderDecoderSpec`) and names
its tensors. T query tokens, S tokens of the encoder, E hidden size, N tokens whose logits are
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch, EncoderBatch
from headrace.back.kernels.upload import held
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.cross_attention import CrossAttentionSpec
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.positions import PositionsSpec
from headrace.back.layers.residual import BlockNorm, Branch, add_norm, total
from headrace.back.layers.scope import Scope
from headrace.back.models.crossing_layer import CrossingLayerSpec
from headrace.back.models.decoder_layer import DecoderSizes, Stream
from headrace.back.models.encoder import TokenLayer, TokenNorm
from headrace.back.models.weights import WeightPlan
from headrace.base.config.resolved import Decision


class SoundSource(Protocol):
    """Sounds of any length, float32 [frames] each -> x_SE, one behind the other."""

    def read(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """See the class."""


class EncoderBridge(Protocol):
    """What stands between the halves."""

    def cross(self, x_SD: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """x_SE: what cross-attentions read of an encoder's outputs."""


class EncoderSource(Protocol):
    """Spectrograms [B, bands, frames] -> x_SE."""

    def read(self, spectrograms: torch.Tensor) -> torch.Tensor:
        """See the class."""


@dataclass(frozen=True, kw_only=True)
class CrossLayerSpec:
    """One decoder layer: attention, cross-attention, feed-forward. `norms` name those of the three
    branches. `post`: each stands behind the sum of its branch and the residual, which then is what
    it gives; else before its branch, and those that `behind` names between its branch and the
    sum."""

    attention: AttentionSpec
    cross: CrossAttentionSpec
    feed_forward: FeedForwardSpec
    norms: tuple[str, str, str]
    post: bool
    behind: tuple[str, str, str] | None = None

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norm: NormSpec) -> CrossLayer:
        """See crossing_layer.CrossingLayerSpec."""
        return CrossLayer(scope, cache, self, sizes, norm)


def plain_cross_layer(
    scope: Scope,
    sizes: DecoderSizes,
    *,
    bias: bool,
    cross: tuple[str, str, str, str, str],
    feed_forward: FeedForwardSpec,
    norms: tuple[str, str, str],
    post: bool = False,
) -> CrossLayerSpec:
    """A layer whose heads of both attentions are the same and are not rotated. `cross` names the
    cross-attention and its four linear layers; those of self_attn have these names too."""
    heads = {
        "width": sizes.width,
        "heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
    }
    return CrossLayerSpec(
        attention=AttentionSpec(
            **heads,
            kv_heads=sizes.heads,
            rope=None,
            qkv_bias=bias,
            out_bias=bias,
            names=AttentionNames(module="self_attn", out=cross[-1]),
        ),
        cross=CrossAttentionSpec(
            **heads, source=sizes.width, span=scope.encoder_tokens, bias=bias, names=cross
        ),
        feed_forward=feed_forward,
        norms=norms,
        post=post,
    )


class CrossLayer:
    """A CrossLayerSpec on this rank; its caches are `cache` and the one behind it."""

    def __init__(
        self, scope: Scope, cache: int, spec: CrossLayerSpec, sizes: DecoderSizes, norm: NormSpec
    ) -> None:
        self._post = spec.post
        self._norms, self._behind = (
            [norm.build(scope / name, sizes.width, eps=sizes.eps) for name in names or ()]
            for names in (spec.norms, spec.behind)
        )
        adds = not spec.post and spec.behind is None
        self._attention = spec.attention.build(scope, cache, adds=adds)
        self.cross = spec.cross.build(scope, cache + 1)
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=adds
        )
        self._feed_forward = spec.feed_forward.build(scope, place)
        self.kv_forms: tuple[CacheForm, ...] = (*self._attention.kv_forms, self.cross.kv_form)

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """Adds the branch of the layer before to the residual, in place, and leaves its own, to be
        added by whoever comes next; with `post` norms all is added already."""
        branch_TE, residual_TE = stream
        x_TE = residual_TE
        if not self._post or branch_TE is not None:
            x_TE = add_norm(self._norms[0], branch_TE, residual_TE)
        if self._post:  # of embeddings and positions only the sum was wanted, in one native call
            x_TE = residual_TE
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self._attention.queries(x_TE, batch, at_N)
        if after is not None and at_N is not None:
            residual_TE, batch = residual_TE.index_select(0, at_N), after
        branch_TE = self._attention.attend_into(handed, residual_TE, batch)
        x_TE, residual_TE = self._next(0, branch_TE, residual_TE)
        branch_TE = self.cross.attend_into(x_TE, residual_TE, batch)
        x_TE, residual_TE = self._next(1, branch_TE, residual_TE)
        branch_TE = self._normed(2, self._feed_forward.forward_into(x_TE, residual_TE))
        if not self._post:
            return branch_TE, residual_TE
        return None, add_norm(self._norms[2], branch_TE, residual_TE)

    def _next(
        self, branch: int, branch_TE: Branch, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the branch after `branch` reads, and the residual that it is added to."""
        norm = self._norms[branch if self._post else branch + 1]
        x_TE = add_norm(norm, self._normed(branch, branch_TE), residual_TE)
        return x_TE, x_TE if self._post else residual_TE

    def _normed(self, branch: int, branch_TE: Branch) -> Branch:
        """What a branch gives, behind the norm that is its own."""
        if not self._behind:
            return branch_TE
        branch_TE = total(branch_TE)
        assert branch_TE is not None, "a branch with a norm behind it does not add"
        return self._behind[branch].norm(branch_TE)


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """Where one of the two stacks lies below the prefix; None: it has no such part. `norm_scale`:
    what its last norm's result is multiplied with. `positions`: its own, where the stacks do not
    have the same; `normed_first`: the embeddings are normed before positions are added."""

    stack: str
    layers: str = "layers"
    embedding_norm: str | None = None
    norm: str | None = None
    norm_scale: float = 1.0
    positions: PositionsSpec | None = None
    normed_first: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """The sizes of an encoder that has others than its decoder, and its embedding."""

    sizes: DecoderSizes
    name: str = "embed_tokens"
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderSpec:
    """A whole encoder-decoder. `encoder_layer` builds one from its scope and number. `prefix` holds
    all but the head, `shared` below it is the embedding. `head`: the output head, where it is not
    the embedding; `logits_bias`: where its bias is, as [1, V], `head_bias`: the layer that has it
    as [V]. `source` makes what turns spectrograms into what the encoder's layers read, from its
    scope and the width; `hears` likewise what turns sounds of any length; without either that are
    tokens. `between`: makes what stands between the halves, from the scope of both. `reads`: the
    encoder has sizes, and below its stack an embedding, of its own;
    `logits_softcap`: bounds the logits; `before_head`: makes what stands between the decoder's
    last layer and the head, from the scope of both."""

    sizes: DecoderSizes
    encoder_layers: int
    encoder_layer: Callable[[Scope, int], TokenLayer]
    layers: tuple[CrossingLayerSpec, ...]
    norm: NormSpec
    encoder: StackSpec
    decoder: StackSpec
    positions: PositionsSpec | None = None
    source: Callable[[Scope, int], EncoderSource] | None = None
    hears: Callable[[Scope, int], SoundSource] | None = None
    between: Callable[[Scope], EncoderBridge] | None = None
    embedding_scale: float = 1.0
    prefix: str = "model"
    shared: str = "shared"
    head: str | None = None
    logits_bias: str | None = None
    head_bias: str | None = None
    logits_softcap: float | None = None
    reads: ReadSpec | None = None
    before_head: Callable[[Scope], TokenNorm] | None = None
    ignored: tuple[str, ...] = ()


class EncoderDecoder:
    """An encoder-decoder on this rank: `back/models/protocol.py: LoadableModel`."""

    generates = True
    media = None
    adapters = None

    def __init__(self, scope: Scope, spec: EncoderDecoderSpec) -> None:
        sizes, inside = spec.sizes, scope / spec.prefix if spec.prefix else scope
        self.logits_width = sizes.vocabulary
        self.attention_heads = 0 if spec.source is None else sizes.heads
        reads = spec.source is None and spec.hears is None
        self.encoder_tokens = scope.encoder_tokens if reads else 0
        self.state = "encoder inputs" if reads else "spectrograms"
        if spec.hears is not None:
            self.state = "sounds"
        self._ledger = scope.ledger
        self._embedding = TokenEmbedding(
            inside / spec.shared,
            sizes.vocabulary,
            sizes.width,
            scale=spec.embedding_scale,
            tied=spec.head is None,
        )
        encoder, decoder = inside / spec.encoder.stack, inside / spec.decoder.stack
        self._read_embedding = self._embedding
        if spec.reads is not None:
            own = spec.reads
            self._read_embedding = TokenEmbedding(
                encoder / own.name, own.sizes.vocabulary, own.sizes.width, scale=own.scale
            )
        self._source = spec.source and spec.source(encoder, sizes.width)
        self._hears = spec.hears and spec.hears(encoder, sizes.width)
        read = spec if reads else replace(spec, positions=None)
        if spec.reads is not None:
            read = replace(read, sizes=spec.reads.sizes)
        self._encoder_ends = StackEnds(encoder, read, spec.encoder)
        at = encoder / spec.encoder.layers
        self._encoder_layers = [
            spec.encoder_layer(at / str(i), i) for i in range(spec.encoder_layers)
        ]
        self._between = spec.between and spec.between(inside)
        self._decoder_ends = StackEnds(decoder, spec, spec.decoder)
        at = decoder / spec.decoder.layers
        self._layers = [
            layer.build(at / str(i), 2 * i, sizes, spec.norm) for i, layer in enumerate(spec.layers)
        ]
        self._before_head = spec.before_head and spec.before_head(inside)
        self.kv_forms = tuple(form for layer in self._layers for form in layer.kv_forms)
        self._head = LogitsHead(
            scope / (spec.head_bias or spec.head or "lm_head"),
            sizes.vocabulary,
            sizes.width,
            tied=self._embedding if spec.head is None else None,
            bias=scope / spec.logits_bias if spec.logits_bias else spec.head_bias is not None,
            softcap=spec.logits_softcap,
        )
        self.weights = WeightPlan(
            params=tuple(self._ledger.params), ignored=spec.ignored, prefix=inside.path
        )
        self.decisions: tuple[Decision, ...] = ()
        self.host_kernels: tuple[str, ...] = ()
        self.host_pairs: int | None = None

    def finish_load(self) -> None:
        """Packs the loaded weights, layer by layer; the plain ones are dropped on the way."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        self.host_kernels = self._ledger.host_kernels()
        self.host_pairs = self._ledger.host_pairs()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See CausalModel. The encoder reads what has come with the batch first."""
        for inputs in batch.encoder:
            self._encode(inputs, batch)
        stream = self._decoder_ends.begin(
            self._embedding.lookup(batch.token_ids_T), batch.positions_T
        )
        for layer in self._layers:
            stream = layer.forward(stream, batch, last=layer is self._layers[-1])
        x_TE = self._decoder_ends.end(stream)
        return x_TE if self._before_head is None else self._before_head.norm(x_TE)

    def _encode(self, inputs: EncoderBatch, batch: Batch) -> None:
        """Runs the encoder and keeps what the cross-attentions read of it."""
        sounds, recorded = inputs.spectrograms, inputs.recorded
        if sounds is None or recorded is None:
            x_SE = self._encoded(inputs, sounds)
        else:
            key = ("spectrograms", *sounds.shape)
            x_SE = recorded(
                key, inputs.positions_S.numel(), sounds, lambda own: self._encoded(inputs, own)
            )
        for decoder_layer in self._layers:
            decoder_layer.cross.write(x_SE, batch, inputs.slots_GS)

    def _encoded(self, inputs: EncoderBatch, spectrograms: torch.Tensor | None) -> torch.Tensor:
        """What the encoder makes of its inputs, x_SE."""
        alone = Batch(
            token_ids_T=inputs.token_ids_S,
            positions_T=inputs.positions_S,
            plans=(),
            group_of_layer=(),
            kv=(),
            logits_at_N=inputs.positions_S[:0],
            query_start=inputs.query_start,
        )
        if self._source is not None:
            assert spectrograms is not None, "an encoder of speech reads spectrograms"
            embedded_SE = self._source.read(spectrograms)
        elif self._hears is not None:
            embedded_SE = self._hears.read(inputs.sounds)
        else:
            embedded_SE = self._read_embedding.lookup(inputs.token_ids_S)
        positions_S = held(inputs.positions_S)
        x_SE = add_norm(None, *self._encoder_ends.begin(embedded_SE, positions_S))
        for layer in self._encoder_layers:
            x_SE = layer.forward(x_SE, alone)
        x_SE = self._encoder_ends.end((None, x_SE))
        return x_SE if self._between is None else self._between.cross(x_SE, positions_S)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width], float32."""
        return self._head.logits(hidden_NE)

    @property
    def argmax(self) -> TopOf | None:
        """See CausalModel."""
        return self._head.argmax

    @property
    def top_candidates(self) -> TopOf | None:
        """See CausalModel."""
        return self._head.top_candidates

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """No classification head is built on these."""
        raise AssertionError("an encoder-decoder has no classification head here")


class StackEnds:
    """What stands before and behind the layers of a stack."""

    def __init__(self, scope: Scope, spec: EncoderDecoderSpec, names: StackSpec) -> None:
        positions = names.positions or spec.positions
        self._positions = positions and positions.build(scope, spec.sizes.width)
        self._normed_first = names.normed_first

        def norm(name: str | None, scale: float = 1.0) -> BlockNorm | None:
            kind, sizes = replace(spec.norm, scale=scale), spec.sizes
            return None if name is None else kind.build(scope / name, sizes.width, eps=sizes.eps)

        self._embedding_norm = norm(names.embedding_norm)
        self._norm = norm(names.norm, names.norm_scale)

    def begin(self, embedded_TE: torch.Tensor, positions_T: torch.Tensor) -> Stream:
        """What the first layer gets."""
        branch_TE = None if self._positions is None else self._positions.lookup(positions_T)
        if self._embedding_norm is None:
            return branch_TE, embedded_TE
        if self._normed_first:
            return branch_TE, self._embedding_norm.norm(embedded_TE)
        return None, add_norm(self._embedding_norm, branch_TE, embedded_TE)

    def end(self, stream: Stream) -> torch.Tensor:
        """What comes of what the last layer leaves."""
        return add_norm(self._norm, *stream)
