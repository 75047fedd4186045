"""Gemma 4 unified (12B) with images: no tower, but norms, one linear layer over the pixels of a
window and a table for rows and one for columns (transformers 5.23, modeling_gemma4_unified.py).

N windows of P pixels, E width behind the first layer, F of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import coordinates
from headrace.back.kernels.upload import planned
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER, RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.encoder import Grid
from headrace.back.models import gemma4_unified
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import parts_of, text_alone, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm

SOUND = r"model\.embed_audio\..*"
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class WindowEmbeddingSpec:
    """`side`: pixels of a window's; `places`: rows, and columns, that have a place; `eps`: of the
    last norm. `mutual`: see MediaForm."""

    side: int
    width: int
    places: int
    outputs: int
    eps: float
    mutual: str


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma4UnifiedForConditionalGeneration."""
    inside = replace(scope, base_within="model.language_model")
    if config.section("vision_config") is None:
        text = config.section("text_config") or config
        return text_alone(inside, text, "the checkpoint has no part that sees")
    text, vision = parts_of(config)
    known = ("all", "vision")
    mutual = text.choice("use_bidirectional_attention", known, "vision") == "vision"
    encoder = WindowEmbedding(scope / "model", _spec(text, vision, "input" if mutual else ""))
    inside = replace(inside, mutual="local" if mutual else "")
    decoder = with_media(scope, gemma4_unified.build(inside, text), encoder)
    ignored = (*decoder.weights.ignored, SOUND)
    decoder.weights = replace(decoder.weights, ignored=ignored)
    return decoder


def _spec(text: ConfigReader, vision: ConfigReader, mutual: str) -> WindowEmbeddingSpec:
    width = vision.int("mm_embed_dim", 3840, ge=1)
    if vision.int("output_proj_dims", width, ge=1) != width:
        raise vision.wrong("output_proj_dims", f"mm_embed_dim ({width})")
    pool = vision.int("pooling_kernel_size", 3, ge=1, le=16)
    return WindowEmbeddingSpec(
        side=vision.int("patch_size", 16, ge=1, le=1024) * pool,
        width=width,
        places=vision.int("mm_posemb_size", 1120, ge=1),
        outputs=text.int("hidden_size", ge=1),
        eps=vision.float("rms_norm_eps", 1e-6, ge=0.0),
        mutual=mutual,
    )


class WindowEmbedding:
    """`MediaEncoder`; `scope` is that of all but the head. A row is a window."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: WindowEmbeddingSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        pixels, width, first = 3 * spec.side**2, spec.width, scope / "vision_embedder"
        self._spec, self._scope = spec, scope
        self._first = [
            (first / "patch_ln1").param(name, (pixels,), init=init)
            for name, init in (("weight", "ones"), ("bias", "zeros"))
        ]
        dense = first / "patch_dense"
        self._dense = dense.param("weight", (width, pixels)), dense.param("bias", (width,))
        self._second = LAYER.build(first / "patch_ln2", width, eps=EPS)
        self._places = first.param("pos_embedding", (spec.places, 2, width))
        self._third = LAYER.build(first / "pos_norm", width, eps=EPS)
        last = scope / "embed_vision"
        self._last = RMS_NO_WEIGHT.build(last, width, eps=spec.eps)
        self._project = WholeLinear(last / "embedding_projection", width, spec.outputs)
        self.width = spec.outputs
        self.dtype = scope.dtype
        self.forms = (
            MediaForm(kind="image", row_bytes=pixels, patch=spec.side, max_t=1, mutual=spec.mutual),
        )
        self._embed = not_loaded
        self._table_P2E = torch.empty(0)
        scope.on_finish(self._finish)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        at_2N = np.concatenate([coordinates(grid, 1) for grid in grids], axis=1)
        row_N, column_N = planned(at_2N, rows_NB.device)
        pixels_NP = self._colours(rows_NB)
        x_NP = F.layer_norm(pixels_NP, pixels_NP.shape[1:], eps=EPS).to(self.dtype)
        x_NE = self._second.norm(self._embed(x_NP))
        x_NE = x_NE + (self._table_P2E[column_N, 0] + self._table_P2E[row_N, 1])
        return self._project.project(self._last.norm(self._third.norm(x_NE)))

    def _colours(self, rows_NB: torch.Tensor) -> torch.Tensor:
        """Values between 0 and 1, or as the checkpoint's processor has them; float32."""
        values = rows_NB.float() / 255
        if self._scope.image_norm is None:
            return values
        mean, std = (
            torch.tensor(one, device=values.device)[:, None] for one in self._scope.image_norm
        )
        return ((values.unflatten(1, (3, -1)) - mean) / std).flatten(1)

    def _finish(self) -> None:
        """The first norm's factors go into the layer behind it, whose inputs come channels first
        then."""
        factor_P, bias_P = (one.take().float() for one in self._first)
        weight_EP, bias_E = (one.take().float() for one in self._dense)
        bias_E = bias_E + weight_EP @ bias_P
        weight_EP = (weight_EP * factor_P).unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)
        self._embed = bind_linear(
            self._scope,
            weight_EP.to(self._scope.dtype).contiguous(),
            bias_E.to(self._scope.dtype),
        )
        self._table_P2E = self._places.take()
