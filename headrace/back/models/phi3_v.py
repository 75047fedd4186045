"""Phi-3-vision and Phi-3.5-vision: Phi-3's decoder behind CLIP's tower. Tiles are put together
again, a learned row behind each row of windows and one between the tiles and the whole, and all go
through two layers (Abdin et al. 2024; names and sizes of the published checkpoints)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid, Passes
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models import phi3
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    SIGLIP_NAMES,
    LayerDefaults,
    square,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Packing

MERGE = 2
EMBEDDED = "model.vision_embed_tokens"
CLIP = LayerDefaults(width=1024, heads=16, inner=4096, eps=1e-5, activation="quick_gelu")
LARGE = {"image_size": 336, "patch_size": 14}
UNREAD = (
    r"model\.vision_embed_tokens\.wte\.weight",
    r"model\.vision_embed_tokens\.img_processor\.vision_model\.(post_layernorm\..*|.*position_ids)",
    r"model\.vision_embed_tokens\.img_processor\.vision_model\.encoder\.layers\.\d+\..*",
)
"""What no image reaches: a second name of the words' table, and what stands behind the layer whose
outputs are taken."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Phi3VForCausalLM."""
    kind = config.required_section("embd_layer")
    kind.choice("hd_transform_order", ("sub_glb",), "sub_glb")
    kind.choice("projection_cls", ("mlp",), "mlp")
    for key in ("use_hd_transform", "with_learnable_separator"):
        if not kind.bool(key, False):
            raise kind.wrong(key, "true")
    inside = scope / EMBEDDED
    tower = Phi3Tower(inside, inside / "img_processor.vision_model", _tower(config))
    decoder = with_media(scope, phi3.build(scope, config), tower)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


class Phi3Tower(PlainTower):
    """A plain tower whose learned rows are of its own width, and projected as windows are."""

    def __init__(self, whole: Scope, scope: Scope, spec: PlainTowerSpec) -> None:
        super().__init__(whole, scope, spec)
        width = spec.layer.width * MERGE**2
        self._ends = (
            whole.param("sub_GN", (1, 1, 1, width)),
            whole.param("glb_GN", (1, 1, width)),
        )
        self._ends_NE = torch.empty(0)
        scope.on_finish(self._take_ends)

    def _take_ends(self) -> None:
        width = self._spec.layer.width
        self._ends_NE = torch.cat([one.take().view(-1, width) for one in self._ends])

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See PlainTower."""
        y_MF = yield from super().passes(kind, rows_NB, grids)
        return torch.cat((y_MF, self._projector.merge(self._ends_NE)))


def _tower(config: ConfigReader) -> PlainTowerSpec:
    stated = config.section("vision_config")
    raw = {} if stated is None else stated.raw
    vision = ConfigReader({**LARGE, **raw}, f"{config.where}: vision_config")
    image = config.required_section("img_processor")
    image.choice("type_feature", ("patch",), "patch")
    layer = tower_layer(vision, CLIP, SIGLIP_NAMES)
    if image.int("image_dim_out", layer.width) != layer.width:
        raise image.wrong("image_dim_out", f"the tower's width ({layer.width})")
    patch, side = square(vision)
    if side % MERGE:
        raise vision.wrong("image_size", "an even number of patches")
    layers = vision.int("num_hidden_layers", 24, ge=1)
    taken = image.int("layer_idx", -2, ge=-layers - 1, le=layers)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            name="embeddings.patch_embedding",
        ),
        layer=layer,
        layers=taken if taken >= 0 else layers + 1 + taken,
        projector=TwoLayers(
            width=layer.width,
            outputs=config.int("hidden_size", ge=1),
            merge=MERGE,
            names=("0", "2"),
            module="img_projection",
        ),
        side=side,
        positions=("embeddings.position_embedding.weight", (side**2 + 1, layer.width)),
        class_token=("embeddings.class_embedding", (layer.width,)),
        before=TowerNorm(name="pre_layrnorm", norm=LAYER),
        frames=True,
        packings={"image": Packing(newline=True, tails=True)},
    )
