"""FNet (Lee-Thorp et al. 2021): BERT that mixes tokens by a Fourier transform over both dimensions
of a text instead of attention."""

from __future__ import annotations

from itertools import pairwise

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, MLP, POOLER, BertEmbeddings, pooler_head
from headrace.back.models.encoder import Encoder, EncoderLayer, EncoderSizes, read_encoder_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """FNetModel, FNetForSequenceClassification, FNetForTokenClassification, FNetForMaskedLM."""
    one_head = ConfigReader({**config.raw, "num_attention_heads": 1}, config.where)
    sizes = read_encoder_sizes(one_head, eps=1e-12, default_activation="gelu_new")
    inside = scope if scope.head.bare else scope / "fnet"
    embedded = inside / "embeddings"
    embeddings = BertEmbeddings(
        embedded, sizes, config, norm=embedded / "LayerNorm", first_position=0
    )
    projection = WholeLinear(embedded / "projection", sizes.width, sizes.width, bias=True)
    layers = [_layer(inside / "encoder.layer" / str(i), sizes) for i in range(sizes.layers)]
    return Encoder(
        scope,
        sizes,
        embed=lambda batch: projection.project(embeddings.embed(batch)),
        layers=layers,
        norm=None,
        classifier=pooler_head(scope, inside, sizes.width),
        ignored=(*IGNORED, POOLER),
        segments=embeddings.num_types > 1,
    )


def _layer(scope: Scope, sizes: EncoderSizes) -> EncoderLayer:
    return EncoderLayer(
        attention=FourierMixing(),
        after_attention=LayerNorm(scope / "fourier.output.LayerNorm", sizes.width, eps=sizes.eps),
        mlp=PlainMLP(
            scope, MLP, sizes.feed_forward, ElementwiseActivation(scope, sizes.activation)
        ),
        after_mlp=LayerNorm(scope / "output.LayerNorm", sizes.width, eps=sizes.eps),
    )


class FourierMixing:
    """x_TE -> the real part of each text's transform over tokens and hidden size."""

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        y_TE = torch.empty_like(x_TE)
        for start, end in pairwise(batch.query_start.tolist()):
            y_TE[start:end] = torch.fft.fft2(x_TE[start:end].float()).real.to(x_TE.dtype)
        return y_TE
