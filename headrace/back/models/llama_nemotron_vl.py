"""NVIDIA's Llama Nemotron embedder and reranker of pages: SigLIP's tower over tiles, windows of
patches side by side, a norm and two layers before a Llama whose tokens see both sides (Moreira et
al. 2026; names of the published checkpoints)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.plain_tower import PlainTower
from headrace.back.models.encoder import Encoder
from headrace.back.models.eurobert import eurobert_encoder
from headrace.back.models.vision import parts_of, siglip_layer, siglip_tower
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision

UNREAD = (r"(model\.)?vision_model\.head\..*", r".*\.position_ids")
RENAMED = ((r"^(model\.)?vision_model\.vision_model\.", r"\1vision_model."),)
PROJECTOR_EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """LlamaNemotronVLModel, LlamaNemotronVLForSequenceClassification, whose head stands beside all
    else."""
    inside = scope if scope.head.kind == "none" else scope / "model"
    text, vision = parts_of(config)
    vision.choice("model_type", ("siglip_vision_model",))
    config.choice("pooling", ("avg",), "avg")
    config.choice("ps_version", ("v2",), "v2")
    if config.int("select_layer", -1) != -1:
        raise config.wrong("select_layer", "-1, the last layer")
    layer = siglip_layer(vision)
    side = vision.int("image_size", ge=1)
    if config.int("force_image_size", side) != side:
        raise config.wrong("force_image_size", f"the tower's ({side})")
    projector = TwoLayers(
        width=layer.width,
        outputs=text.int("hidden_size", ge=1),
        merge=round(1 / config.float("downsample_ratio", 0.5, ge=0.01, le=1.0)),
        names=("1", "3"),
        norm=("0", LAYER, PROJECTOR_EPS),
        norm_merged=True,
        module="mlp1",
    )
    tower = PlainTower(inside, inside / "vision_model", siglip_tower(vision, projector, layer))
    encoder = eurobert_encoder(scope, inside / "language_model", text)
    encoder.media = tower
    weights = encoder.weights
    encoder.weights = replace(
        weights,
        ignored=(*weights.ignored, *UNREAD),
        renamed=(*weights.renamed, *RENAMED),
    )
    scope.ledger.note(Decision("model.parts", "auto", "text, image", "what the checkpoint takes"))
    return encoder
