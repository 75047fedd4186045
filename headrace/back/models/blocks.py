"""The decoder that most families share: embedding, layers, norm, head, and the plain keys of
config.json.

A family file reads its own config, states what differs (`LayerSpec` per layer, with a row of the
placements of norms; `DecoderSpec` for the rest) and names its tensors; the forward pass is here
once. T tokens, E hidden size, N tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.embedding.op import Embedding
from headrace.back.layers.classifier import classifier_of
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.gains import EmbeddingSkipsSpec
from headrace.back.layers.layer_tail import LayerInputsSpec
from headrace.back.layers.linear import add_norm, total
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.norm import RMS, BlockNormSpec, NormSpec
from headrace.back.layers.positions import PositionsSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.streams import ResidualStreamsSpec
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.control_layer import steered
from headrace.back.models.decoder_layer import (
    DecoderLayerSpec,
    DecoderSizes,
    Layer,
    LayerSpec,
    Stream,
    at_last_tokens,
    begun,
    tapped,
)
from headrace.back.models.families import HEADS, WIDTH
from headrace.back.models.sequence_layer import in_parts
from headrace.back.models.stage import stage_of
from headrace.back.models.streamed_layer import host_layer, streamed
from headrace.back.models.weights import Param, WeightPlan, names_within
from headrace.base.config.hf import REQUIRED, ConfigReader
from headrace.base.config.layer_count import num_layers
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError

__all__ = [
    "EPS",
    "BuildFamily",
    "Decoder",
    "DecoderNames",
    "DecoderSizes",
    "DecoderSpec",
    "LayerSpec",
    "plain_attention",
    "read_sizes",
    "read_windows",
]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
PLAIN_ACTIVATIONS = {**ACTIVATIONS, "xielu": "xielu"}
"""Of MLPs without a gate."""
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.rotary_emb\.(cos|sin)_cached")


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """Where a decoder lies in its checkpoint: all but the output head below `prefix`.
    `embedding_norm`: the norm of the tokens' embeddings, `norm`: the last; None: there is none."""

    prefix: str = "model"
    embedding: str = "embed_tokens"
    embedding_norm: str | None = None
    layers: str = "layers"
    norm: str | None = "norm"
    head: str = "lm_head"


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A whole decoder. `norm` is the kind of all norms of the residual but, where they are others,
    `first_norm` of the embeddings and `last_norm` behind the layers. `positions`: what is added to
    the embeddings, with `normed_first` behind their norm. `layer_inputs`: of the layers' tails.
    `draft_layer`: of the head for multi-token prediction, where that is not as the last layer.
    `streams`: of residuals, where there are several, or another width than embeddings have,
    `embedding_width`. `embedding_beside`, `embedding_tables`: see TokenEmbedding. `media_rows`: of
    the embedding, behind the vocabulary's: no head knows them. `renamed`: see WeightPlan."""

    sizes: DecoderSizes
    layers: tuple[DecoderLayerSpec, ...]
    norm: NormSpec = RMS
    last_norm: BlockNormSpec | None = None
    first_norm: BlockNormSpec | None = None
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    logits_normed: bool = False
    logits_bias: bool = False
    positions: PositionsSpec | None = None
    normed_first: bool = False
    layer_inputs: LayerInputsSpec | EmbeddingSkipsSpec | None = None
    streams: ResidualStreamsSpec | None = None
    embedding_width: int | None = None
    embedding_beside: int | None = None
    embedding_tables: tuple[tuple[str, int], ...] = ()
    media_rows: int = 0
    names: DecoderNames = DecoderNames()
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    draft_layer: DecoderLayerSpec | None = None


class Decoder:
    """A decoder-only language model on this rank: `back/models/protocol.py: CausalModel`."""

    encoder_tokens = 0

    def __init__(self, scope: Scope, spec: DecoderSpec) -> None:
        names, sizes = spec.names, spec.sizes
        prefix = scope.base_within or names.prefix
        inside = scope if scope.head.bare else scope / prefix
        self.logits_width = sizes.vocabulary
        self.generates = scope.head.kind == "lm"
        self.attention_heads = sizes.heads
        self._ledger = scope.ledger
        self.adapters, self.directions = scope.adapters, scope.directions
        stage = self._stage = stage_of(scope, spec, lambda at: Decoder(at, spec).weights)
        self.spec = spec = stage.built(spec)
        self._build_front(scope, inside, spec)
        self._layers: list[Layer] = []
        self.kv_forms: tuple[CacheForm, ...] = ()
        params_of = self._build_layers(inside / names.layers, spec)
        if not all(layer.takes_adapters for layer in self._layers):
            self.adapters = None
        self._last_writer = stage.last_writer(self._layers)
        self._layer_inputs = spec.layer_inputs and spec.layer_inputs.build(
            inside, sizes.width, len(self._layers), norms=spec.norm, eps=sizes.eps
        )
        self._streams = spec.streams and spec.streams.build(inside, sizes.width)
        self.state = "recurrent" if any(f.kind == "state" for f in self.kv_forms) else "plain"
        self._norm = None
        if stage.is_last and names.norm is not None:
            last = spec.last_norm or spec.norm
            self._norm = last.build(inside / names.norm, sizes.width, eps=sizes.eps)
        elif not stage.is_last:
            self._norm = stage.sent()
        self._head = self._logits_head(scope, spec) if stage.is_last and self.generates else None
        self._classifier = classifier_of(scope, sizes.width) if stage.is_last else None
        if not all(layer.mixer and layer.mixer.probed for layer in self._layers):
            self.attention_heads = 0
        tied = (rf"{names.head}\.(weight|bias)",) if sizes.tied or not self.generates else ()
        others = stage.others(self._ledger.params)
        self.weights = WeightPlan(
            params=tuple(self._ledger.params),
            ignored=(*IGNORED, *others, *names_within(scope.path, (*tied, *spec.ignored))),
            prefix=(scope / prefix).path,
            renamed=spec.renamed,
            layers=params_of,
        )
        self.media: MediaEncoder | None = None
        self.decisions: tuple[Decision, ...] = ()
        self.host_kernels: tuple[str, ...] = ()
        self.host_pairs: int | None = None

    def _build_front(self, scope: Scope, inside: Scope, spec: DecoderSpec) -> None:
        """What stands before the layers, and the table that a tied head shares."""
        names, sizes, stage = spec.names, spec.sizes, self._stage
        tied_here = sizes.tied and self.generates
        if stage.is_first or (stage.is_last and tied_here):
            self._table = TokenEmbedding(
                inside / names.embedding,
                sizes.vocabulary + spec.media_rows,
                spec.embedding_width or sizes.width,
                scale=spec.embedding_scale,
                tied=tied_here,
                tables=spec.embedding_tables,
                beside=spec.embedding_beside,
            )
        self._embedding = self._table if stage.is_first else stage.received(sizes.width, scope)
        positions = spec.positions if stage.is_first else None
        self._positions = positions and positions.build(inside, sizes.width)
        self._embedding_norm = None
        if stage.is_first and names.embedding_norm is not None:
            at = inside / names.embedding_norm
            first = spec.first_norm or spec.norm
            self._embedding_norm = first.build(at, sizes.width, eps=sizes.eps)

    def _build_layers(self, inside: Scope, spec: DecoderSpec) -> tuple[tuple[Param, ...], ...]:
        """The layers, and the caches that they write; the parameters of each."""
        params_of: list[tuple[Param, ...]] = []
        for index in self._stage.layers:
            first = len(self._ledger.params)
            with host_layer(inside / str(index), index) as (at, built):
                built.append(
                    spec.layers[index].build(at, len(self.kv_forms), spec.sizes, spec.norm)
                )
            self._layers += built
            self.kv_forms += self._layers[-1].kv_forms
            params_of.append(tuple(self._ledger.params[first:]))
        layers = in_parts(streamed(self._layers, inside), inside, spec.layers)
        self._layers = steered(layers, inside, self._stage.layers, spec.sizes.width)
        return tuple(params_of)

    def _logits_head(self, scope: Scope, spec: DecoderSpec) -> LogitsHead:
        return LogitsHead(
            scope / spec.names.head,
            spec.sizes.vocabulary,
            spec.embedding_width or spec.sizes.width,
            tied=self._table if spec.sizes.tied else None,
            bias=spec.logits_bias,
            scale=spec.logits_scale,
            softcap=spec.logits_softcap,
            normed=spec.logits_normed,
        )

    def finish_load(self) -> None:
        """Packs the loaded weights, layer by layer; the plain ones are dropped on the way."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        self.host_kernels = self._ledger.host_kernels()
        self.host_pairs = self._ledger.host_pairs()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See CausalModel."""
        if self.adapters is not None:
            self.adapters.take(batch)
        branch_TE = self._positions.lookup(batch.positions_T) if self._positions else None
        stream: Stream = branch_TE, self._embedding.lookup(batch.token_ids_T)
        if self._embedding_norm is not None:
            stream = begun(self._embedding_norm, stream, first=self.spec.normed_first)
        encoded = batch.encoded
        if encoded is not None:
            stream = stream[0], encoded.put(stream[1])
        inputs_LTP = None
        if self._layer_inputs is not None:
            token_ids_T = batch.token_ids_T
            if encoded is not None:
                token_ids_T = encoded.marked(token_ids_T, self._layer_inputs.media_id)
            inputs_LTP = self._layer_inputs.of(token_ids_T, stream[1])
        if self._streams is not None:
            stream = stream[0], self._streams.begin(stream[1])
        for index, layer in enumerate(self._layers):
            if batch.taps is not None and index in batch.taps.layers:
                stream = total(stream[0]), stream[1]  # a sum over ranks is taken once, in place
                batch.taps.see(index, stream[1], stream[0])
            stream = layer.forward(stream, batch, last=layer is self._last_writer)
            if encoded is not None and index < encoded.num_layers:
                stream = None, add_norm(None, *stream)
                encoded.add(index, stream[1])
            if layer is self._last_writer and self._goes_on:
                batch, inputs_LTP = at_last_tokens(batch, inputs_LTP)
            if layer.tail is not None:
                input_TP = None if inputs_LTP is None else inputs_LTP[index]
                stream = None, layer.tail.forward(add_norm(None, *stream), input_TP)
        if self._streams is not None:
            stream = None, self._streams.end(stream[1])
        taps, norm = batch.taps, self._norm
        return add_norm(norm, *stream) if taps is None else tapped(taps, self._layers, norm, stream)

    @property
    def embed(self) -> Embedding:
        """ids_T -> x_TE as the layers read them, without adapters: of drafters with this table."""
        return self._table.plain

    @property
    def embedding(self) -> TokenEmbedding:
        """The table itself: of encoders whose rows hold embeddings of tokens."""
        return self._table

    @property
    def head(self) -> LogitsHead:
        """The output head without adapters: of drafters that share it."""
        assert self._head is not None, "the model has no language-model head"
        return self._head.alone

    @property
    def taps_until(self) -> int:
        """Layers in front of which a batch's taps see all tokens; 0: there is no such residual."""
        plain = self._streams is None and self._layer_inputs is None
        last = self._last_writer
        return self._layers.index(last) + 1 if plain and last is not None else 0

    @property
    def _goes_on(self) -> bool:
        """Whether something reads the batch behind the last layer that writes a cache."""
        return self._last_writer is not self._layers[-1] or self._layer_inputs is not None

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width], float32."""
        assert self._head is not None, "the model has no language-model head"
        return self._head.logits(hidden_NE)

    @property
    def argmax(self) -> TopOf | None:
        """See CausalModel."""
        return None if self._head is None else self._head.argmax

    @property
    def top_candidates(self) -> TopOf | None:
        """See CausalModel."""
        return None if self._head is None else self._head.top_candidates

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Class logits [N, labels], float32."""
        assert self._classifier is not None, "the model has no classification head"
        return self._classifier.logits(hidden_NE)


BuildFamily = Callable[[Scope, ConfigReader], Decoder]
EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""What a norm's epsilon is called besides `rms_norm_eps`."""
INNER = ("n_inner", "ffn_hidden_size", "ffn_dim")


def read_sizes(
    config: ConfigReader,
    *,
    activation: tuple[str, ...] = ("hidden_act", "hidden_activation"),
    default_activation: str = "silu",
    gated: bool = True,
    eps: float = 1e-6,
    tied: bool = False,
    kv_heads: int | None = None,
    inner: int | None = None,
) -> DecoderSizes:
    """The common sizes, checked against each other. `eps`, `tied` and `inner` are the family's
    defaults, `kv_heads` those of a family with a key of its own."""
    width = config.int("hidden_size", aliases=WIDTH, ge=1)
    heads = config.int("num_attention_heads", aliases=HEADS, ge=1)
    kv_heads = kv_heads or config.int("num_key_value_heads", heads, ge=1)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = config.int("head_dim", None, ge=0) or None  # 0: a part of heads that is not there
    if head_dim is None and width % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int(
            "intermediate_size", inner or (REQUIRED if gated else 4 * width), aliases=INNER, ge=1
        ),
        layers=num_layers(config),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or width // heads,
        eps=config.float("rms_norm_eps", eps, aliases=EPS, ge=0.0),
        activation=read_activation(config, activation, default_activation, gated=gated),
        tied=config.bool("tie_word_embeddings", tied),
    )


def read_activation(
    config: ConfigReader, keys: tuple[str, ...], default: str, *, gated: bool = True
) -> str:
    """The activation, by the first of `keys` that is there."""
    known = ACTIVATIONS if gated else PLAIN_ACTIVATIONS
    return known[config.choice(keys[0], known, default, aliases=keys[1:])]


def read_windows(
    config: ConfigReader, layers: int, *, window: int | None, sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types` if the config lists them, else where `sliding(layer)`
    says so."""
    types = config.list("layer_types", None, of=str)
    if types is None:
        return tuple(window if window and sliding(layer) else None for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if len(types) != layers or not set(types) <= set(known):
        raise config.wrong("layer_types", f"{layers} of {', '.join(known)}")
    if "sliding_attention" in types and not window:
        raise CheckpointError(
            f"{config.where}: layer_types names sliding_attention, but sliding_window is absent",
            field="sliding_window",
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def plain_attention(sizes: DecoderSizes) -> dict[str, object]:
    """The arguments of AttentionSpec that follow from the sizes; the scale is 1/sqrt(head_dim)."""
    return {
        "width": sizes.width,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
    }
