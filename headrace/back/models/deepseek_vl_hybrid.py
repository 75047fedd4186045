"""DeepSeek-VL 7B: Llama's decoder behind two towers that see one picture, SigLIP's a small square
of it and SAM's a large one, whose rows stand side by side (Lu et al. 2024; transformers 5.23,
modeling_deepseek_vl_hybrid.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.merger import OneLayer
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.layers.vision.sam import SamNeck, SamSpec, SamTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.got_ocr2 import NAMES, read_sam
from headrace.back.models.vision import (
    OLDER_TOWER,
    parts_of,
    siglip_layer,
    siglip_tower,
    text_decoder,
    with_media,
)
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm

NECK = replace(NAMES, neck=("conv1", "layer_norm1", "conv2", "layer_norm2"))
SAM_NAMES = replace(NAMES, halving=("conv1", "conv2"))


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekVLHybridForConditionalGeneration."""
    text, vision = parts_of(config)
    large = config.required_section("high_res_vision_config")
    outputs = text.int("hidden_size", ge=2)
    layer = siglip_layer(vision)
    half = OneLayer(
        width=layer.width, outputs=outputs // 2, merge=1, name="aligner.vision_proj", bias=True
    )
    middle = large.int("output_channels", 256, ge=1)
    sam = read_sam(large, (2 * middle, 4 * middle), SAM_NAMES)
    if not sam.full_layers:
        raise large.wrong("global_attn_indexes", "one layer at least")
    tower = HybridTower(scope / "model", siglip_tower(vision, half, layer), sam, outputs)
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)


class HybridTower:
    """`MediaEncoder`; `scope` is that of all but the head. The rows of an input are the patches of
    the large square, then those of the small one, row by row."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, small: PlainTowerSpec, large: SamSpec, outputs: int) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        # The processor's file states colours of the small square.
        plain = replace(scope, image_norm=None)
        self._large, self._side = large, small.side
        self._siglip = PlainTower(scope, scope / "vision_model", small)
        self._sam = SamTower(
            plain / "high_res_vision_model.vision_encoder", large, scope / "high_res_vision_proj"
        )
        self._neck = SamNeck(scope / "high_res_vision_neck", replace(large, names=NECK))
        self._alpha = scope.param("high_res_vision_alpha", (1,))
        half, aligner = outputs // 2, scope / "aligner"
        wide = large.narrowed[1]
        self._project = WholeLinear(aligner / "high_res_vision_proj", wide, half, bias=True)
        self._out = WholeLinear(aligner / "proj", outputs, outputs, bias=True)
        self.width, self.dtype = outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=large.patches.row_bytes,
                patch=large.patches.patch,
                sides=((1, large.side**2 + small.side**2),),
                max_t=1,
                rows_each=small.side**2,
            ),
        )
        self._share = torch.empty(0)
        scope.on_finish(self._finish)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        count, side = self._large.side**2, self._large.side
        images = rows_NB.view(len(grids), -1, rows_NB.shape[1])
        small = images[:, count:].flatten(0, 1)
        low_MF = self._siglip.encode(kind, small, [(1, self._side, self._side)] * len(grids))
        outputs = list(self._sam.outputs(images[:, :count].flatten(0, 1), side))
        seen = self._halved(self._sam.narrowed(outputs[-1]))
        early = self._halved(self._neck.forward(outputs[self._large.full_layers[0]]))
        seen = (seen + early * self._share).flatten(2).transpose(1, 2).flatten(0, 1)
        both_MF = torch.cat((self._project.project(seen), low_MF), dim=1)
        return self._out.project(F.gelu(both_MF))

    def _halved(self, planes: torch.Tensor) -> torch.Tensor:
        """At the size of the small square."""
        size = (4 * self._side,) * 2
        return self._sam.halving.forward(F.interpolate(planes, size=size, mode="bilinear"))

    def _finish(self) -> None:
        self._share = self._alpha.take()
