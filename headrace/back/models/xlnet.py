"""XLNet (Yang et al. 2019) as an encoder: each token of a text reads all others, by what they are,
by how far before or behind it they stand (Dai et al. 2019, section 3.3) and by whether they are of
its segment. Its language model is not built (not_built.py).

T tokens of a step, N of a text, E hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import Classifier, Dense
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import IGNORED, Table
from headrace.back.models.encoder import (
    Encoder,
    EncoderLayer,
    EncoderSizes,
    read_encoder_sizes,
)
from headrace.base.config.hf import ConfigReader

KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "d_inner",
    "head_dim": "d_head",
    "hidden_act": "ff_activation",
}
"""What other encoders call it, and what it calls itself."""
MLP = PlainMLPSpec(name="", up="layer_1", down="layer_2", bias=True)
UNREAD = (r"(transformer\.)?mask_emb", r"lm_loss\..*")
CLS, CLS_SEGMENT = 3, 2
"""The token that ends a text in all published vocabularies, which is a segment of its own."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """XLNetModel, XLNetForSequenceClassification, XLNetForTokenClassification."""
    own = {ours: config.raw[theirs] for ours, theirs in KEYS.items() if config.raw.get(theirs)}
    reader = ConfigReader({**config.raw, **own}, config.where)
    reader.choice("attn_type", ("bi",), "bi")
    for key in ("bi_data", "same_length"):
        if reader.bool(key, False):
            raise config.wrong(key, "false")
    if reader.int("clamp_len", -1) > 0:
        raise config.wrong("clamp_len", "-1")
    sizes = read_encoder_sizes(reader, eps=1e-12)
    inside = scope if scope.head.bare else scope / "transformer"
    words = Table(inside / "word_embedding", sizes.vocabulary, sizes.width)
    return Encoder(
        scope,
        sizes,
        embed=lambda batch: F.embedding(batch.token_ids_T, words.rows),
        layers=[_layer(inside / "layer" / str(i), sizes) for i in range(sizes.layers)],
        norm=None,
        classifier=_head(scope, reader, sizes.width),
        ignored=(*IGNORED, *UNREAD),
        segments=True,
    )


def _layer(scope: Scope, sizes: EncoderSizes) -> EncoderLayer:
    attention, ff = scope / "rel_attn", scope / "ff"
    return EncoderLayer(
        attention=RelativeSpans(attention, sizes),
        after_attention=LayerNorm(attention / "layer_norm", sizes.width, eps=sizes.eps),
        mlp=PlainMLP(ff, MLP, sizes.feed_forward, ElementwiseActivation(ff, sizes.activation)),
        after_mlp=LayerNorm(ff / "layer_norm", sizes.width, eps=sizes.eps),
    )


def _head(outer: Scope, config: ConfigReader, width: int) -> Classifier | None:
    """The class logits of the last token behind a layer, or of each token."""
    head = outer.head
    if head.kind == "none":
        return None
    if head.kind == "token":
        return Classifier(Dense(outer / "classifier", width, head.num_labels, bias=True))
    config.choice("summary_type", ("last",), "last")
    config.choice("summary_activation", ("tanh",), "tanh")
    if not config.bool("summary_use_proj", True):
        raise config.wrong("summary_use_proj", "true")
    return Classifier(
        Dense(outer / "logits_proj", width, head.num_labels, bias=True),
        first=Dense(outer / "sequence_summary" / "summary", width, width, bias=True),
    )


class RelativeSpans:
    """x_TE -> y_TE, a text at a time, by PyTorch's operations; every rank has all of it."""

    def __init__(self, scope: Scope, sizes: EncoderSizes) -> None:
        heads = (sizes.heads, sizes.head_dim)
        shape = (sizes.width, *heads)
        self._width, self._scale = sizes.width, sizes.head_dim**-0.5
        self._params = {name: scope.param(name, shape) for name in "qkvor"}
        self._params |= {f"r_{one}_bias": scope.param(f"r_{one}_bias", heads) for one in "wrs"}
        self._params["seg_embed"] = scope.param("seg_embed", (2, *heads))
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See TokenLayer."""
        assert batch.query_start is not None
        segment_T = torch.zeros_like(batch.positions_T)
        if batch.segments_T is not None:
            segment_T = batch.segments_T
        parts = []
        for begin, end in pairwise(batch.query_start.tolist()):
            ends = (batch.token_ids_T[begin:end] == CLS) & (batch.positions_T[begin:end] > 0)
            ends[:-1] = False
            segment_N = segment_T[begin:end].masked_fill(ends, CLS_SEGMENT)
            parts.append(self._read(x_TE[begin:end], segment_N))
        return torch.cat(parts)

    def _read(self, x_NE: torch.Tensor, segment_N: torch.Tensor) -> torch.Tensor:
        """y_NE of one text."""
        own, count = self._weights, len(x_NE)
        q_NHD, k_NHD, v_NHD = (torch.einsum("ne,ehd->nhd", x_NE, own[one]) for one in "qkv")
        met_HNN = torch.einsum("nhd,mhd->hnm", q_NHD + own["r_w_bias"], k_NHD)
        place_N = torch.arange(count, device=x_NE.device)
        far_M = torch.arange(1 - count, count, device=x_NE.device)
        r_MHD = torch.einsum("me,ehd->mhd", self._sines(far_M).to(x_NE.dtype), own["r"])
        far_HNM = torch.einsum("nhd,mhd->hnm", q_NHD + own["r_r_bias"], r_MHD)
        before_NN = place_N[:, None] - place_N + (count - 1)
        met_HNN = met_HNN + far_HNM.gather(2, before_NN.expand(len(far_HNM), -1, -1))
        of_HN2 = torch.einsum("nhd,shd->hns", q_NHD + own["r_s_bias"], own["seg_embed"])
        other_NN = (segment_N[:, None] != segment_N).long()
        met_HNN = met_HNN + of_HN2.gather(2, other_NN.expand(len(of_HN2), -1, -1))
        share_HNN = (met_HNN * self._scale).float().softmax(2).to(x_NE.dtype)
        y_NHD = torch.einsum("hnm,mhd->nhd", share_HNN, v_NHD)
        return torch.einsum("nhd,ehd->ne", y_NHD, own["o"])

    def _sines(self, far_M: torch.Tensor) -> torch.Tensor:
        """Sines, then cosines, of distances, [M, E]."""
        step = torch.arange(0, self._width, 2, device=far_M.device).float() / self._width
        angle = far_M[:, None].float() / torch.pow(10_000, step)
        return torch.cat((angle.sin(), angle.cos()), dim=1)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}
