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

from headrace.back.attention.plan import Batch, EncoderBatch
from headrace.back.kernels.upload import held
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.linear import add_norm
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.norm import BlockNorm, NormSpec
from headrace.back.layers.positions import PositionsSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import MediaEncoder
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
    encoder has sizes, and below its stack an embedding, of its own; `apart`: a vector below
    `shared` that is the embedding of a token, unscaled, and not the head's; `media`: makes rows of
    images that stand for some of the encoder's tokens, or with `only_seen` for all of them: then
    there is no embedding of these; `logits_softcap`: bounds the logits; `before_head`: makes what
    stands between the decoder's last layer and the head, from the scope of both."""

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
    apart: tuple[str, int] | None = None
    media: MediaEncoder | None = None
    only_seen: bool = False
    before_head: Callable[[Scope], TokenNorm] | None = None
    ignored: tuple[str, ...] = ()


class EncoderDecoder:
    """An encoder-decoder on this rank: `back/models/protocol.py: LoadableModel`."""

    generates = True
    adapters = None

    def __init__(self, scope: Scope, spec: EncoderDecoderSpec) -> None:
        sizes, inside = spec.sizes, scope / spec.prefix if spec.prefix else scope
        self.media, self._only_seen = spec.media, spec.only_seen
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
        self._apart = spec.apart and VectorApart(inside / spec.shared, *spec.apart, sizes.width)
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
        embedded_TE = self._embedding.lookup(batch.token_ids_T)
        if self._apart is not None:
            embedded_TE = self._apart.put(batch.token_ids_T, embedded_TE)
        stream = self._decoder_ends.begin(embedded_TE, batch.positions_T)
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
            embedded_SE = self._with_seen(inputs)
        positions_S = held(inputs.positions_S)
        x_SE = add_norm(None, *self._encoder_ends.begin(embedded_SE, positions_S))
        for layer in self._encoder_layers:
            x_SE = layer.forward(x_SE, alone)
        x_SE = self._encoder_ends.end((None, x_SE))
        return x_SE if self._between is None else self._between.cross(x_SE, positions_S)

    def _with_seen(self, inputs: EncoderBatch) -> torch.Tensor:
        """The embeddings of tokens, rows of images in the places of those that stand for these."""
        seen = inputs.seen
        if self._only_seen and seen is not None:
            rows_SE = seen.rows_ME.new_zeros(inputs.token_ids_S.numel(), seen.rows_ME.shape[1])
            return seen.put(rows_SE)
        embedded_SE = self._read_embedding.lookup(inputs.token_ids_S)
        if self._apart is not None:
            embedded_SE = self._apart.put(inputs.token_ids_S, embedded_SE)
        return embedded_SE if seen is None else seen.put(embedded_SE)

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


class VectorApart:
    """The embedding of one token, which stands in no table."""

    def __init__(self, scope: Scope, name: str, token: int, width: int) -> None:
        self._token, self._vector = token, scope.param(name, (width,), init="zeros")
        self._vector_E = torch.empty(0)
        scope.on_finish(self._finish)

    def put(self, token_ids_T: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, with that of this one."""
        return torch.where((token_ids_T == self._token)[:, None], self._vector_E, x_TE)

    def _finish(self) -> None:
        self._vector_E = self._vector.take()


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
