"""HyperCLOVA X SEED Think with images: its decoder behind Qwen2.5-VL's tower and one linear layer;
its positions are those of text (NAVER 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid, Passes
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models import hyperclovax
from headrace.back.models.blocks import Decoder
from headrace.back.models.qwen2_vl import windowed_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader

LAYOUTS = (
    (r"model\.projector\.(.*)", r"model.vision_projector.\1"),
    (r"model\.language_model\.lm_head\.(.*)", r"lm_head.\1"),
    (r"model\.language_model\.model\.(.*)", r"model.language_model.\1"),
)
"""Other names of the same tensors."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HyperCLOVAXVisionV2ForConditionalGeneration."""
    text, vision = parts_of(config)
    spec = replace(windowed_tower(vision), positions_per_s=0.0)
    tower = ProjectedTower(scope / "model", spec, text.int("hidden_size", ge=1))
    inside = replace(scope, base_within="model.language_model")
    return with_media(scope, hyperclovax.build(inside, text), tower, renamed=LAYOUTS)


class ProjectedTower(VisionTower):
    """The tower with a linear layer behind it."""

    def __init__(self, scope: Scope, spec: TowerSpec, outputs: int) -> None:
        super().__init__(scope / "vision_model", spec, None)
        whole = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._linear = WholeLinear(
            whole / "vision_projector", spec.merger.outputs, outputs, bias=True
        )
        self.width = outputs

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See RestingEncoder."""
        x_NE = yield from super().passes(kind, rows_NB, grids)
        return self._linear.project(x_NE)
