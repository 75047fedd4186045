"""The thinker of Qwen3-Omni, which answers in text: Qwen 3 with experts behind Qwen3-VL's vision
tower and the audio tower of Qwen3-ASR (Xu et al. 2025, "Qwen3-Omni"). A video is one input, whose
steps are spaced by seconds."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.audio.tower import AudioTower, AudioTowerSpec
from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.hearing import parts_that_hear
from headrace.back.models.moe import feed_forwards, sparse_layers
from headrace.back.models.qwen2_5_omni import THINKER, thinking
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen2_vl import MERGER
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.back.models.qwen3_asr import qwen3_audio_tower
from headrace.back.models.qwen3_vl import qwen3_axes, qwen3_tower
from headrace.back.models.vision import parts_of, with_media
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MAX_ROWS, MAX_TIME_POSITIONS

THETA = 1_000_000.0


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3OmniMoeThinkerForConditionalGeneration."""
    text, vision = parts_of(config)
    _, audio = parts_that_hear(config)
    per_s = config.float("position_id_per_seconds", 13.0, ge=0.0)
    scope = replace(scope, max_positions=scope.max_positions + MAX_TIME_POSITIONS)
    sizes = read_sizes(text)
    rope = qwen3_axes(
        scope,
        text,
        vision,
        head_dim=sizes.head_dim,
        theta=THETA,
        positions_per_s=per_s,
        behind_time=True,
    )
    sees = VisionTower(scope / "visual", _vision_tower(vision, per_s), rope)
    inside = scope / "audio_tower"
    hears = AudioTower(inside, inside, _audio_tower(audio, text))
    if "num_experts" in text:
        mixture = qwen_mixture(text, renormalize=True)
        branches = feed_forwards(mixture, sparse_layers(text, sizes.layers))
    else:
        branches = (GATED_MLP,) * sizes.layers
    decoder = qwen3_decoder(scope, text, sizes, branches, default_theta=THETA)
    return thinking(with_media(scope, decoder, Towers(sees, hears), renamed=THINKER))


def _vision_tower(vision: ConfigReader, positions_per_s: float) -> TowerSpec:
    """Qwen3-VL's, of whose videos any number of steps is one input."""
    tower = qwen3_tower(vision)
    return replace(
        tower,
        merger=replace(tower.merger, names=MERGER),
        max_t=MAX_ROWS,
        positions_per_s=positions_per_s,
        names=("blocks", "merger", "merger_list", "pos_embed"),
    )


def _audio_tower(audio: ConfigReader, text: ConfigReader) -> AudioTowerSpec:
    """Qwen3-ASR's, with the last layers in the tower itself."""
    spec = qwen3_audio_tower(audio, outputs=text.int("hidden_size", ge=1))
    assert isinstance(spec.projector, TwoLayers)
    projector = replace(spec.projector, names=("proj1", "proj2"), module="")
    return replace(spec, projector=projector, fills=False)
