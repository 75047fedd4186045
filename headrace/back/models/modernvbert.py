"""ColModernVBERT: SigLIP's tower and a pixel shuffle before ModernBERT, whose tokens a projection
makes comparable one by one (Teiletche et al. 2025). The projection is read with the pooling
(load/dense.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import OneLayer
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.encoder import Encoder
from headrace.back.models.late_vision import PROJECTIONS
from headrace.back.models.modernbert import modernbert_encoder
from headrace.back.models.vision import OLDER_TOWER, parts_of, siglip_layer, siglip_tower
from headrace.back.models.vlm_inside import inside_vlm
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision

UNREAD = (r"vlm\.vision_model\.head\..*", r"vlm\.text_model\.head\..*")


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """ColModernVBertForRetrieval."""
    inside = ConfigReader(inside_vlm(config.raw), f"{config.where}: vlm_config")
    text, vision = parts_of(inside)
    layer = siglip_layer(vision)
    connector = OneLayer(
        width=layer.width,
        outputs=text.int("hidden_size", ge=1),
        merge=inside.int("pixel_shuffle_factor", 4, ge=1),
        name="connector.modality_projection",
    )
    within = scope / "vlm"
    tower = PlainTower(within, within / "vision_model", siglip_tower(vision, connector, layer))
    encoder = modernbert_encoder(scope, within / "text_model", text)
    encoder.media = tower
    weights = encoder.weights
    encoder.weights = replace(
        weights,
        ignored=(*weights.ignored, *UNREAD, *PROJECTIONS),
        renamed=(
            *weights.renamed,
            *OLDER_TOWER,
            (r"(vlm\.vision_model)\.vision_model\.(.*)", r"\1.\2"),
        ),
    )
    scope.ledger.note(Decision("model.parts", "auto", "text, image", "what the checkpoint takes"))
    return encoder
