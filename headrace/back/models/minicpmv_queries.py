"""MiniCPM-V 2.6, 4.0 and 4.5 with images: the decoder that the version has behind SigLIP's tower at
any size, of each slice of which so many learned queries see all (Yao et al. 2024, MiniCPM-V; each
slice of a picture is an image of its own)."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.layers.vision.resampler import ResamplerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import HALF, parts_of, siglip_layer, square, with_media
from headrace.base.config.hf import ConfigReader

DECODERS: Mapping[tuple[int, ...], str] = {(2, 6): "qwen2", (4, 0): "llama", (4, 5): "qwen3"}
"""By version."""
HEAD_DIM = 128
"""Of the queries' heads."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniCPMV."""
    from headrace.back.models.registry import FAMILIES

    family = DECODERS[read_version(config, DECODERS)]
    text, vision = parts_of(config)
    tower = PlainTower(scope, scope / "vpm", query_tower(config, text, vision))
    decoder = FAMILIES.load(family)(scope / "llm", text)
    assert isinstance(decoder, Decoder), family
    return with_media(scope, decoder, tower)


def read_version(config: ConfigReader, known: Mapping[tuple[int, ...], str]) -> tuple[int, ...]:
    """`version`, a number or its text; CheckpointError for one that is missing or not known."""
    stated = str(config.raw.get("version"))
    parts = tuple(int(one) if one.isdecimal() else -1 for one in stated.split("."))
    version = (*parts, 0)[:2]
    if version not in known:
        names = ", ".join(".".join(map(str, one)) for one in known)
        raise config.wrong("version", f"one of {names}")
    return version


def query_tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    """SigLIP's layers, each patch at the place its share of the image falls into, and the queries
    behind them."""
    _, side = square(vision)
    layer, outputs = siglip_layer(vision), text.int("hidden_size", ge=1)
    queries = config.int("query_num", 64, ge=1, le=4096)
    if outputs % HEAD_DIM:
        raise text.wrong("hidden_size", f"a multiple of {HEAD_DIM}")
    dropped = config.bool("drop_vision_last_layer", False)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 14, ge=1, le=1024),
            mean=HALF,
            std=HALF,
            name="embeddings.patch_embedding",
        ),
        layer=layer,
        layers=vision.int("num_hidden_layers", 27, ge=2) - dropped,
        projector=ResamplerSpec(
            width=layer.width, outputs=outputs, queries=queries, heads=outputs // HEAD_DIM
        ),
        table_side=side,
        shares=True,
        positions=("embeddings.position_embedding.weight", (side**2, layer.width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
        rows_each=queries,
    )
