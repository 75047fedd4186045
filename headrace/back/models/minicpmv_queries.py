"""MiniCPM-V 2.6, 4.0 and 4.5 with images: the decoder that the version has behind SigLIP's tower at
any size, of each slice of which so many learned queries see all (Yao et al. 2024, MiniCPM-V; each
slice of a picture is an image of its own). MiniCPM-o 2.6 and 4.5 hear besides: Whisper's encoder,
whose positions see the second they are in and those before it, two layers, and means of a few
positions; what speaks is not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.back.layers.audio.tower import AudioTower, AudioTowerSpec, LinePair
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.layers.vision.resampler import ResamplerSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    LINE_STRIDES,
    num_layers,
    whisper_layer,
    without_key_bias,
)
from headrace.back.models.vision import HALF, parts_of, siglip_layer, square, with_media
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import SoundSteps

HEARING = "MiniCPMO"
SPEAKING = r"tts\..*"
"""What makes speech of the answer."""
HEARING_DECODERS: Mapping[tuple[int, ...], str] = {(2, 6): "qwen2", (4, 5): "qwen3"}
MEANS = {(2, 6): 2, (4, 5): 5}
"""Positions of a token, unless the config says."""
POSITIONS_PER_S = 50
NUM_MARKS = 2
"""Tokens behind a second and before the next."""
DECODERS: Mapping[tuple[int, ...], str] = {(2, 6): "qwen2", (4, 0): "llama", (4, 5): "qwen3"}
"""By version."""
HEAD_DIM = 128
"""Of the queries' heads."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MiniCPMV, MiniCPMO."""
    from headrace.back.models.registry import FAMILIES

    hears = config.raw["architectures"][0] == HEARING
    decoders = HEARING_DECODERS if hears else DECODERS
    family = decoders[read_version(config, decoders)]
    text, vision = parts_of(config)
    tower: MediaEncoder = PlainTower(scope, scope / "vpm", query_tower(config, text, vision))
    if hears:
        tower = Towers(tower, _audio_tower(scope, config, outputs=tower.width))
    decoder = FAMILIES.load(family)(scope / "llm", text)
    assert isinstance(decoder, Decoder), family
    decoder = with_media(scope, decoder, tower)
    if hears:
        decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, SPEAKING))
    return decoder


def _audio_tower(scope: Scope, config: ConfigReader, *, outputs: int) -> AudioTower:
    audio = config.required_section("audio_config")
    layer, positions = whisper_layer(audio), audio.int("max_source_positions", 1500, ge=1)
    version = read_version(config, HEARING_DECODERS)
    means = config.int("audio_pool_step", MEANS[version], ge=1, le=POSITIONS_PER_S)
    seen_s = config.float("audio_chunk_length", 1.0)
    spec = AudioTowerSpec(
        bands=audio.int("num_mel_bins", 80, ge=1),
        steps=SoundSteps(strides=LINE_STRIDES, pool=means, row=POSITIONS_PER_S // means),
        reader=LinePair(table=positions),
        layer=layer,
        layers=num_layers(audio),
        projector=TwoLayers(
            width=layer.width,
            outputs=outputs,
            names=("linear1", "linear2"),
            activation="relu",
            module="audio_projection_layer",
        ),
        norm="layer_norm",
        max_frames=2 * positions,
        block=max(0, int(seen_s * POSITIONS_PER_S)),
        means=means,
        breaks=NUM_MARKS,
    )
    return AudioTower(scope, without_key_bias(scope / "apm"), spec)


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
