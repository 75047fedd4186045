"""Images of Gemma 3n: MobileNet-V5's map of 16 x 16 places, scaled, normed and projected, and the
token that ends an image, whose row is of a table beside the decoder's (transformers 5.23,
modeling_gemma3n.py; timm 1.0 has the tower)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS, RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.mobilenet import STAGES, MobileNet, MobileNetSpec
from headrace.back.layers.vision.patches import PatchSpec, WholePictures
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm

ARCHITECTURE = "mobilenetv5_300m_enc"
PATCH = 48
"""Pixels a side of what becomes a token: of 768 a side."""
LEAST = 0.9
"""Of a number of channels that is rounded to eights."""


@dataclass(frozen=True, kw_only=True)
class Gemma3nVisionSpec:
    """`end`: row of the table, of `vocabulary`, that ends an image."""

    tower: MobileNetSpec
    eps: float
    vocabulary: int
    end: int
    outputs: int


def gemma3n_vision_spec(
    config: ConfigReader, vision: ConfigReader, text: ConfigReader
) -> Gemma3nVisionSpec:
    """What the config says."""
    vision.choice("architecture", (ARCHITECTURE,), ARCHITECTURE)
    tower = MobileNetSpec(stages=STAGES)
    if vision.int("hidden_size", tower.outputs, ge=1) != tower.outputs:
        raise vision.wrong("hidden_size", str(tower.outputs))
    if config.int("vision_soft_tokens_per_image", tower.side**2, ge=1) != tower.side**2:
        raise config.wrong("vision_soft_tokens_per_image", str(tower.side**2))
    first, count = (
        vision.int("vocab_offset", 262_144, ge=0),
        vision.int("vocab_size", 128, ge=1),
    )
    end = config.int("eoi_token_id", 262_144, aliases=("eoi_token_index",), ge=0)
    if not first <= end < first + count:
        raise config.wrong("eoi_token_id", f"one of the {count} ids from {first} on")
    return Gemma3nVisionSpec(
        tower=_scaled(tower, vision),
        eps=vision.float("rms_norm_eps", 1e-6, ge=0.0),
        vocabulary=count,
        end=end - first,
        outputs=text.int("hidden_size", ge=1),
    )


def _scaled(tower: MobileNetSpec, vision: ConfigReader) -> MobileNetSpec:
    """With so many times the channels as `model_args` says, if it does; the first convolution has
    none fewer."""
    args = vision.raw.get("model_args") or {}
    known = isinstance(args, Mapping) and not set(args) - {"channel_multiplier"}
    scale = args.get("channel_multiplier", 1.0) if known else 0
    if not isinstance(scale, (int, float)) or scale <= 0:
        raise vision.wrong("model_args", "nothing but channel_multiplier, above 0")
    stages = tuple(
        tuple(replace(block, outputs=_rounded(block.outputs * scale)) for block in blocks)
        for blocks in tower.stages
    )
    return replace(tower, stages=stages, stem=_rounded(tower.stem * max(1.0, scale)))


def _rounded(channels: float) -> int:
    """To eights, but not to less than nine tenths."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < LEAST * channels else near


class Gemma3nVisionTower:
    """`MediaEncoder`; `scope` is that of tower and projection."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: Gemma3nVisionSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._spec, width, side = spec, spec.tower.outputs, spec.tower.side
        leading = scope / "embed_vision"
        # its processor scales to between 0 and 1, and does no more
        patches = PatchSpec(patch=PATCH, mean=(0.0,) * 3, std=(1.0,) * 3)
        self._pictures = WholePictures(scope, patches)
        self._tower = MobileNet(scope / "vision_tower.timm_model", spec.tower)
        self._table = leading.param("embedding.weight", (spec.vocabulary, width))
        self._hard, self._soft = (
            RMS.build(leading / name, width, eps=spec.eps)
            for name in ("hard_embedding_norm", "soft_embedding_norm")
        )
        self._lead = WholeLinear(leading / "embedding_projection", width, spec.outputs)
        self._last = RMS_NO_WEIGHT.build(leading, spec.outputs, eps=spec.eps)
        self.width, self.dtype = spec.outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=patches.row_bytes,
                patch=PATCH,
                sides=((side, side),),
                max_t=1,
                extra=1,
            ),
        )
        self._end_1E = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._end_1E = self._table.take()[self._spec.end][None].clone()

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder: the places of an image row by row, and its end."""
        parts = rows_NB.split([t * h * w for t, h, w in grids])
        pixels = [self._pictures.of(part, grid)[0] for part, grid in zip(parts, grids, strict=True)]
        map_IEHW = self._tower.forward(torch.stack(pixels).permute(0, 3, 1, 2))
        x_INE = map_IEHW.flatten(2).transpose(1, 2) * self._spec.tower.outputs**0.5
        soft_INE = self._soft.norm(x_INE.flatten(0, 1)).view_as(x_INE)
        end_I1E = self._hard.norm(self._end_1E).expand(len(grids), 1, -1)
        x_ME = torch.cat((soft_INE, end_I1E), dim=1).flatten(0, 1)
        return self._last.norm(self._lead.project(x_ME))
