"""Granite Docling: Granite's decoder behind SigLIP's tower, whose windows get places of their own
and two layers between norms; what some of its layers see is added behind the first layers of the
decoder (IBM 2026; transformers 5.23, modeling_granite_docling.py, its coarse path; a tile is an
image of its own)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.layers.vision.resampler import row_and_column_sines
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    parts_of,
    siglip_layer,
    siglip_tower,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader

EPS = 1e-5
UNREAD = (
    r"model\.vision_model\.connector\.fine\..*",
    r"model\.density_router\..*",
    r"mtp\..*",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteDoclingForConditionalGeneration."""
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "model.vision_model", _tower(text, vision))
    inside = replace(scope, base_within="model.text_model")
    decoder = with_media(scope, text_decoder(inside, text), tower)
    weights = decoder.weights
    decoder.weights = replace(weights, ignored=(*weights.ignored, *UNREAD))
    return decoder


def _tower(text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    layer = siglip_layer(vision)
    outputs = text.int("hidden_size", ge=4)
    if vision.int("out_hidden_size", outputs) != outputs:
        raise vision.wrong("out_hidden_size", f"the decoder's width ({outputs})")
    layers = vision.int("num_hidden_layers", 12, ge=1)
    deep = vision.list("deepstack_visual_indexes", (3, 7, 10), of=int)
    if any(not 0 <= one < layers for one in deep):
        raise vision.wrong("deepstack_visual_indexes", f"layers of the {layers} there are")
    projector = SeveralLayersSpec(
        width=layer.width,
        outputs=outputs,
        merge=vision.int("scale_factor", 4, ge=1, le=16),
        deep=len(deep),
        eps=layer.eps,
        scale=text.float("embedding_multiplier", 1.0),
    )
    spec = siglip_tower(vision, projector, layer)
    taken = (*(one + 1 for one in sorted(deep)), layers)
    return replace(spec, taken=taken, behind=None, deep=len(deep))


@dataclass(frozen=True, kw_only=True)
class SeveralLayersSpec:
    """Windows of `deep` earlier layers and of the last one, side by side in this order. `scale`: of
    what stands for tokens, as of their embeddings."""

    width: int
    outputs: int
    merge: int
    deep: int
    eps: float
    scale: float

    def build(self, scope: Scope) -> SeveralLayers:
        """See ProjectorSpec."""
        return SeveralLayers(scope / "model.vision_model", self)


class SeveralLayers:
    """x_NX -> y_MY by SeveralLayersSpec: rows for tokens, then what is added behind each layer.
    `GridProjector`, of grids of one size."""

    def __init__(self, scope: Scope, spec: SeveralLayersSpec) -> None:
        self._spec, inside = spec, scope / "connector"
        width, outputs = spec.width, spec.outputs
        self._behind = LAYER.build(scope / "post_layernorm", width, eps=spec.eps)
        self._before = LAYER.build(inside / "ln_in", width, eps=EPS)
        window = width * spec.merge**2
        self._up = WholeLinear(inside / "coarse.projection", window, outputs)
        self._middle = LAYER.build(inside / "ln_mid", outputs, eps=EPS)
        self._down = WholeLinear(inside / "mlp_fc2", outputs, outputs)
        self._last = LAYER.build(inside / "ln_out", outputs, eps=EPS)
        two = TwoLayers(
            width=width,
            outputs=outputs,
            merge=spec.merge,
            norm=("layer_norm", LAYER, EPS),
            norm_merged=True,
            module="",
        )
        mergers = inside / "coarse.deepstack_mergers"
        self._mergers = [two.build(mergers / str(index)) for index in range(spec.deep)]

    def merge(self, x_NX: torch.Tensor) -> torch.Tensor:
        """See Projector; of one square."""
        side = int(x_NX.shape[0] ** 0.5)
        return self.merge_grids(x_NX, [(1, side, side)])

    def merge_grids(self, x_NX: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        spec = self._spec
        *deep, last_NE = (part.contiguous() for part in x_NX.split(spec.width, dim=1))
        x_NE = self._before.norm(self._behind.norm(last_NE))
        y_MF = self._up.project(x_NE.view(-1, spec.merge**2 * spec.width))
        _, h, w = grids[0]
        size = h // spec.merge, w // spec.merge
        places_PF = row_and_column_sines(*size, spec.outputs, y_MF.device).to(y_MF.dtype)
        y_MF = (y_MF.unflatten(0, (-1, places_PF.shape[0])) + places_PF).flatten(0, 1)
        y_MF = self._last.norm(self._down.project(F.gelu(self._middle.norm(y_MF))))
        added = [merger.merge(part) for merger, part in zip(self._mergers, deep, strict=True)]
        return torch.cat((y_MF * spec.scale, *added), dim=1)
