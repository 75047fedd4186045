"""EncoderDecoderModel of two BERTs or RoBERTas (Rothe et al. 2020): the second with cross-attention
behind its attention and a language-model head.

T tokens, P positions, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.kernels.embedding.op import OP, Embedding, EmbeddingProblem
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.cross_attention import CrossAttentionSpec
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import Positions
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.bert import BERT
from headrace.back.models.blocks import DecoderSizes
from headrace.back.models.crossing_layer import CrossLayerSpec
from headrace.back.models.encoder import (
    EncoderLayer,
    EncoderSizes,
    SpanAttentionLayer,
    read_encoder_sizes,
)
from headrace.back.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderSpec,
    ReadSpec,
    StackSpec,
)
from headrace.base.config.hf import ConfigReader

MLP = PlainMLPSpec(name="", up="intermediate.dense", down="output.dense", bias=True)
NAMES = AttentionNames(
    **{"module": "attention", "query": "self.query", "key": "self.key", "value": "self.value"},
    out="output.dense",
)
CROSS = ("crossattention", "self.query", "self.key", "self.value", "output.dense")
NORMS = ("attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm")
WORDS, EMBEDDING_NORM = "embeddings.word_embeddings", "embeddings.LayerNorm"
IGNORED = (
    r"encoder\.pooler\..*",
    r".*embeddings\.position_ids",
    r"decoder\.(cls\.predictions|lm_head)\.decoder\.(weight|bias)",
)


@dataclass(frozen=True, kw_only=True)
class HalfKind:
    """What tells a half's kinds apart: where its layers lie in a decoder, its head with the two
    parts of what stands before it, and whether positions begin behind the padding's id."""

    prefix: str
    head: str
    dense: str
    norm: str
    padded: bool


BERT_HALF = HalfKind(
    prefix="bert",
    head="cls.predictions",
    dense="transform.dense",
    norm="transform.LayerNorm",
    padded=False,
)
ROBERTA_HALF = HalfKind(
    prefix="roberta", head="lm_head", dense="dense", norm="layer_norm", padded=True
)
KINDS = {"bert": BERT_HALF, **dict.fromkeys(("roberta", "xlm-roberta"), ROBERTA_HALF)}


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """EncoderDecoderModel."""
    reads, says = (config.required_section(name) for name in ("encoder", "decoder"))
    read, said = (KINDS[half.choice("model_type", KINDS)] for half in (reads, says))
    read_sizes, sizes = (read_encoder_sizes(half, eps=1e-12) for half in (reads, says))
    for half in (reads, says):
        half.choice("position_embedding_type", ("absolute",), "absolute")
    if read_sizes.width != sizes.width:
        raise config.wrong("decoder", f"of the encoder's hidden_size ({read_sizes.width})")
    positions = _positions(reads, read)
    if positions.rows - positions.unused < scope.encoder_tokens:
        needed = f"{scope.encoder_tokens} positions at least (--max-model-len)"
        raise reads.wrong("max_position_embeddings", needed)
    layer = _layer(scope, sizes)
    head = f"decoder.{said.head}"
    return EncoderDecoder(
        scope,
        EncoderDecoderSpec(
            sizes=_decoder_sizes(sizes),
            encoder_layers=read_sizes.layers,
            encoder_layer=lambda at, i: _encoder_layer(at, read_sizes),
            layers=(layer,) * sizes.layers,
            norm=LAYER,
            encoder=StackSpec(
                stack="encoder",
                layers="encoder.layer",
                embedding_norm=EMBEDDING_NORM,
                positions=positions,
            ),
            decoder=StackSpec(
                stack=f"decoder.{said.prefix}",
                layers="encoder.layer",
                embedding_norm=EMBEDDING_NORM,
                positions=_positions(says, said),
            ),
            prefix="",
            shared=f"decoder.{said.prefix}.{WORDS}",
            head_bias=head,
            reads=ReadSpec(sizes=_decoder_sizes(read_sizes), name=WORDS),
            before_head=lambda at: HeadTransform(at / head, said, sizes),
            ignored=IGNORED,
        ),
    )


class HeadTransform:
    """x_TE -> norm(act(dense(x)))."""

    def __init__(self, scope: Scope, kind: HalfKind, sizes: EncoderSizes) -> None:
        self._dense = WholeLinear(scope / kind.dense, sizes.width, sizes.width, bias=True)
        self._activation = ElementwiseActivation(scope, "gelu" if kind.padded else sizes.activation)
        self._norm = LAYER.build(scope / kind.norm, sizes.width, eps=sizes.eps)

    def norm(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._norm.norm(self._activation.apply(self._dense.project(x_TE)))


@dataclass(frozen=True, kw_only=True)
class TypedPositions:
    """Learned positions, behind `unused` rows that no text reaches, each with the first of `types`
    rows of token types added."""

    rows: int
    unused: int
    types: int

    def build(self, scope: Scope, width: int) -> Positions:
        """See PositionsSpec."""
        return _TypedPositions(scope, self, width)


class _TypedPositions:
    def __init__(self, scope: Scope, spec: TypedPositions, width: int) -> None:
        self.lookup: Embedding = not_loaded
        self._scope, self._spec, self._width = scope, spec, width
        at = scope / "embeddings"
        self._rows = at.param("position_embeddings.weight", (spec.rows, width))
        self._types = at.param("token_type_embeddings.weight", (spec.types, width))
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        table_PE = self._rows.take()[self._spec.unused :] + self._types.take()[0]
        problem = EmbeddingProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            rows=len(table_PE),
            width=self._width,
        )
        self.lookup = self._scope.bind(OP, problem, table_PE)


def _positions(config: ConfigReader, kind: HalfKind) -> TypedPositions:
    unused = config.int("pad_token_id", 1, ge=0) + 1 if kind.padded else 0
    return TypedPositions(
        rows=config.int("max_position_embeddings", 512, ge=unused + 1),
        unused=unused,
        types=config.int("type_vocab_size", 2, ge=1),
    )


def _decoder_sizes(sizes: EncoderSizes) -> DecoderSizes:
    same = ("vocabulary", "width", "inner", "layers", "heads", "kv_heads", "head_dim", "eps")
    return DecoderSizes(
        **{name: getattr(sizes, name) for name in same}, activation=sizes.activation, tied=True
    )


def _layer(scope: Scope, sizes: EncoderSizes) -> CrossLayerSpec:
    heads = {
        "width": sizes.width,
        "heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
    }
    return CrossLayerSpec(
        attention=AttentionSpec(
            **heads, kv_heads=sizes.heads, rope=None, qkv_bias=True, out_bias=True, names=NAMES
        ),
        cross=CrossAttentionSpec(
            **heads, source=sizes.width, span=scope.encoder_tokens, bias=True, names=CROSS
        ),
        feed_forward=MLP,
        norms=NORMS,
        post=True,
    )


def _encoder_layer(scope: Scope, sizes: EncoderSizes) -> EncoderLayer:
    attention, after = (
        LAYER.build(scope / name, sizes.width, eps=sizes.eps) for name in NORMS[::2]
    )
    mlp = MLP.build(scope, sizes.feed_forward)
    assert isinstance(mlp, PlainMLP), mlp
    return EncoderLayer(
        attention=SpanAttentionLayer(scope, sizes, names=BERT.projections, out=BERT.out),
        after_attention=attention,
        mlp=mlp,
        after_mlp=after,
    )
