"""MOSS Transcribe-Diarize: Qwen 3's decoder behind Whisper's encoder over windows of half a minute,
four positions side by side, two linear layers and a norm. It writes who says what, and when
(transformers 5.23, modeling_moss_transcribe_diarize.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.audio.heard_windows import HeardWindows, HeardWindowsSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.models.blocks import Decoder
from headrace.back.models.hearing import (
    EPS,
    num_layers,
    parts_that_hear,
    whisper_layer,
    without_key_bias,
)
from headrace.back.models.vision import ACTIVATIONS, text_decoder, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm, SoundSteps

RENAMED = (
    (r"model\.(audio_tower|multi_modal_projector)\.(.*)", r"\1.\2"),
    (r"model\.language_model\.(.*)", r"language_model.model.\1"),
    (r"lm_head\.(.*)", r"language_model.lm_head.\1"),
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MossTranscribeDiarizeForConditionalGeneration."""
    text, audio = parts_that_hear(config)
    windows = HeardWindowsSpec(
        bands=audio.int("num_mel_bins", 80, ge=1),
        layer=whisper_layer(audio),
        layers=num_layers(audio),
        positions=audio.int("max_source_positions", 1500, ge=1),
        beside=config.int("audio_merge_size", 4, ge=1),
        eps=EPS,
    )
    tower = DiarizingTower(scope, windows, config, text)
    decoder = text_decoder(scope / "language_model", text)
    return with_media(scope, decoder, tower, renamed=RENAMED)


class DiarizingTower:
    """`MediaEncoder`; `scope` is the checkpoint's."""

    rope = None
    layers = 0

    def __init__(
        self, scope: Scope, windows: HeardWindowsSpec, config: ConfigReader, text: ConfigReader
    ) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._spec, self.width = windows, text.int("hidden_size", ge=1)
        self._windows = HeardWindows(without_key_bias(scope / "audio_tower"), windows)
        activation = config.choice("projector_hidden_act", ACTIVATIONS, "silu")
        projector = TwoLayers(
            width=windows.outputs,
            outputs=self.width,
            bias=config.bool("projector_bias", True),
            activation=ACTIVATIONS[activation],
        )
        self._projector = projector.build(scope)
        eps = text.float("rms_norm_eps", 1e-6, ge=0.0)
        self._norm = LAYER.build(scope / "multi_modal_projector.norm", self.width, eps=eps)
        self.dtype = scope.dtype
        steps = SoundSteps(pool=windows.margin, chunk=windows.rows, margin=windows.margin)
        self.forms = (MediaForm(kind="audio", row_bytes=4 * windows.bands, max_t=1, sound=steps),)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        frames_NM = rows_NB.view(torch.float32).to(self.dtype)
        inputs = frames_NM.split([t * h * w for t, h, w in grids])
        windows = [part for one in inputs for part in one.split(self._spec.rows)]
        return self._norm.norm(self._projector.merge(self._windows.hear(windows)))
