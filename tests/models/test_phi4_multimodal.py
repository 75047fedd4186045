"""Phi-4 multimodal sees and hears as transformers does: tiles with what fills them up, the whole behind them, sounds
alone and beside a picture, which lead to the decoder by other layers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)

from headrace.base.config.media import MediaSpec
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.families import PROCESSORS, read_media
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.launch.config_files import read_config
from tests.front.media.pictures import picture
from tests.front.media.test_log_mel import sound
from tests.models.media import SeeingEngine, answer_of, compare_answers, save_media_oracle
from tests.models.test_hearing import TEXT
from tests.models.test_pictures import Ready, _digest_of

IMAGE, SOUND, SIDE, PATCH, BANDS = 100, 101, 64, 8, 16
TILINGS = {(700, 500): (7, 5)}


def config() -> Any:
    return transformers.Phi4MultimodalConfig(
        **{**TEXT, "original_max_position_embeddings": 512, "tie_word_embeddings": False},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3},
            **{"num_attention_heads": 2, "image_size": SIDE, "crop_size": SIDE},
            **{"patch_size": PATCH, "image_token_id": IMAGE},
        },
        audio_config={
            **{"hidden_size": 32, "intermediate_size": 24, "num_blocks": 2},
            **{"num_attention_heads": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 6},
            **{"depthwise_separable_out_channel": 32, "input_size": BANDS},
            **{"bias_max_distance": 6, "audio_token_id": SOUND},
        },
    )


class Both:
    """The reference's model and our engine over the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.oracle = save_media_oracle(transformers.Phi4MultimodalForCausalLM, config(), folder)
        spec = read_media(folder, config().to_dict() | {"architectures": ["Phi4Multimodal"]})
        assert spec is not None
        self.spec: MediaSpec = spec
        self.folder, self.engine = folder, SeeingEngine(folder, longest=1024)

    def heard(self, samples: np.ndarray, *, seeing: bool) -> ProcessedMedia:
        settings = self.spec.settings
        assert settings.sound is not None and settings.sound.seeing is False
        told = msgspec.structs.replace(settings.sound, seeing=seeing)
        return spectrogram(samples, msgspec.structs.replace(settings, sound=told))

    def seen(self, width: int, height: int) -> ProcessedMedia:
        return PROCESSORS.load(self.spec.processor)(self.spec.settings).image(
            picture(width, height, 1)
        )

    def check(self, media: dict[int, ProcessedMedia], inputs: dict[str, Any]) -> None:
        """`inputs`: of the reference, for the same."""
        kinds = {IMAGE: "image", SOUND: "audio"}
        prepared = [
            _prepared(one, kinds[token], _digest_of(one), 0, 2) for token, one in media.items()
        ]
        ids: list[int] = [3]
        for token in media:
            ids += [token, 7]
        ids, spans = expanded(ids, prepared, self.spec, lambda text: [], field="prompt")
        tensor = torch.tensor([ids])
        whole = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor), **inputs}
        ready = Ready(ids, spans)
        expected = answer_of(self.oracle, ready, whole, 4)
        for step in (1024, 7):
            engine = self.engine.with_steps(self.folder, max_step_tokens=step)
            compare_answers(engine.run(ready, max_tokens=4)[0], expected)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    both = Both(tmp_path_factory.mktemp("model"))
    yield both
    both.engine.close()


def frames_of(medium: ProcessedMedia) -> torch.Tensor:
    (one,) = medium.inputs
    return torch.from_numpy(one.rows.view(np.float32)[:, :-1].copy())[None]


def pixels_of(medium: ProcessedMedia) -> dict[str, Any]:
    """Our pixels and masks as the reference's inputs; the whole stands first there."""
    tiles, whole = medium.inputs
    assert tiles.cut is not None
    values, shown = [], []
    for one in (whole, tiles):
        rows, side = one.rows, SIDE // PATCH
        own = rows[:, :-1].reshape(-1, side // 2, side // 2, 2, 2, 3, PATCH, PATCH)
        own = own.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, SIDE, SIDE)
        values.append(own)
        told = rows[:, -1].reshape(-1, side // 2, side // 2, 2, 2)
        shown.append(told.transpose(0, 1, 3, 2, 4).reshape(-1, side, side))
    columns = tiles.cut.columns
    size = [tiles.grid[0] // columns * SIDE, columns * SIDE]
    pixels = torch.from_numpy(np.concatenate(values)).float() / 255
    return {
        "image_pixel_values": (pixels[None] - 0.5) / 0.5,
        "image_attention_mask": torch.from_numpy(np.concatenate(shown))[None].float(),
        "image_sizes": torch.tensor([size]),
    }


def theirs(width: int, height: int) -> dict[str, torch.Tensor]:
    """By torch's interpolation (the reference's processor needs torchvision)."""
    columns, rows = math.ceil(width / SIDE), math.ceil(height / SIDE)
    if columns * rows > 36:
        columns, rows = TILINGS[width, height]
    scale = min(columns * SIDE / width, rows * SIDE / height)
    across, down = int(width * scale + 1e-9), int(height * scale + 1e-9)
    small = picture(width, height, 1).resize((across, down), Image.Resampling.BILINEAR)
    ground = torch.full((3, rows * SIDE, columns * SIDE), 255.0)
    ground[:, :down, :across] = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    values = (ground / 255 - 0.5) / 0.5
    whole = F.interpolate(values[None], size=(SIDE, SIDE), mode="bicubic")
    side = SIDE // PATCH
    mask = torch.ones(rows * side, columns * side)
    mask[rows * side - (rows * SIDE - down) // PATCH :] = 0
    mask[:, columns * side - (columns * SIDE - across) // PATCH :] = 0
    tiles = values.unflatten(1, (rows, SIDE)).unflatten(3, (columns, SIDE))
    masks = mask.unflatten(0, (rows, side)).unflatten(2, (columns, side)).transpose(1, 2)
    return {
        "pixels": torch.cat([whole, tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)])[None],
        "mask": torch.cat([torch.ones(1, side, side), masks.flatten(0, 1)])[None],
        "size": torch.tensor([[rows * SIDE, columns * SIDE]]),
    }


def check_pixels(inputs: dict[str, Any], width: int, height: int) -> None:
    expected = theirs(width, height)
    assert torch.equal(inputs["image_attention_mask"], expected["mask"])
    assert torch.equal(inputs["image_sizes"], expected["size"])
    apart = inputs["image_pixel_values"] - expected["pixels"].clamp(-1, 1)
    assert apart[:, 1:].abs().max() < 1e-5 and apart[:, 0].abs().max() < 1.01 / 255


def test_a_picture_and_a_sound(both: Both) -> None:
    seen, heard = both.seen(150, 90), both.heard(sound(0.93), seeing=True)
    inputs = pixels_of(seen)
    check_pixels(inputs, 150, 90)
    frames = frames_of(heard)
    size = torch.tensor([heard.inputs[0].num_tokens])
    both.check(
        {IMAGE: seen, SOUND: heard},
        inputs | {"audio_input_features": frames, "audio_embed_sizes": size},
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 41.0])
def test_sounds(both: Both, seconds: float) -> None:
    """Of more than 40 s in pieces."""
    heard = both.heard(sound(seconds), seeing=False)
    frames = frames_of(heard)
    extractor = Phi4MultimodalFeatureExtractor(feature_size=BANDS)
    wave = sound(seconds) / np.float32(32768.0)
    expected = extractor(wave, sampling_rate=16_000, return_tensors="pt")
    assert (frames - expected["audio_input_features"]).abs().max() < 1e-3
    size = torch.tensor([heard.inputs[0].num_tokens])
    assert size == expected["audio_embed_sizes"]
    both.check({SOUND: heard}, {"audio_input_features": frames, "audio_embed_sizes": size})


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(40, 40), (64, 200), (300, 61), (700, 500)])
def test_pictures(both: Both, width: int, height: int) -> None:
    seen = both.seen(width, height)
    inputs = pixels_of(seen)
    check_pixels(inputs, width, height)
    both.check({IMAGE: seen}, inputs)


NAMES = (
    (r"feed_forward_(in|out)\.gate_up_proj", r"feed_forward_\1.net.0.linear"),
    (r"feed_forward_(in|out)\.down_proj", r"feed_forward_\1.net.2"),
    (r"(audio_embed.*self_attn)\.([qkv])_proj", r"\1.linear_\2"),
    (r"(audio_embed.*self_attn)\.o_proj", r"\1.linear_out"),
    (r"(up|down)_proj_for_speech", lambda one: f"audio_projection.speech.{2 * (one[1] == 'down')}"),
    (
        r"(up|down)_proj_for_vision_speech",
        lambda one: f"audio_projection.vision.{2 * (one[1] == 'down')}",
    ),
    (r"img_projection_up", "img_projection.0"),
    (r"img_projection_down", "img_projection.2"),
    (r"global_img_feature_extensor", "glb_GN"),
    (r"sub_img_feature_extensor", "sub_GN"),
    (r"(layers\.\d+\.(?:self_attn\.(?:qkv|o)|mlp\.(?:gate_up|down))_proj)", r"\1.base_layer"),
)


@pytest.mark.slow
def test_the_first_checkpoint_is_read_under_its_own_names(both: Both, tmp_path: Path) -> None:
    """Its adapters stand among its weights, too; what is not said of its tower is as published."""
    tensors = {}
    for name, tensor in load_file(both.folder / "model.safetensors").items():
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
        if name.endswith("base_layer.weight"):
            for part in ("lora_A", "lora_B"):
                tensors[name.replace("base_layer", f"{part}.vision")] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    keys = json.loads((both.folder / "config.json").read_text())
    audio = keys.pop("audio_config")
    audio |= {"attention_dim": audio.pop("hidden_size")}
    audio |= {"attention_heads": audio.pop("num_attention_heads")}
    audio |= {"linear_units": audio.pop("intermediate_size")}
    audio |= {"nemo_conv_settings": {"conv_channels": audio.pop("nemo_conv_channels")}}
    audio |= {
        "relative_attention_bias_args": {"t5_bias_max_distance": audio.pop("bias_max_distance")}
    }
    keys |= {
        **{"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"},
        "audio_processor": {"name": "cascades", "config": audio},
        "embd_layer": {
            "audio_embd_layer": {"downsample_rate": 1},
            "image_embd_layer": {"crop_size": SIDE, "hd_transform_order": "sub_glb"},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    added = [{"id": IMAGE, "content": "<|seen|>"}, {"id": SOUND, "content": "<|heard|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    spec = read_media(tmp_path, read_config(tmp_path))
    assert spec is not None and spec.written == {"image": "<|seen|>", "audio": "<|heard|>"}
    engine = SeeingEngine(tmp_path, longest=1024)
    seen, heard = both.seen(70, 40), both.heard(sound(0.5), seeing=True)
    media = {IMAGE: (seen, "image"), SOUND: (heard, "audio")}
    prepared = [_prepared(one, kind, _digest_of(one), 0, 2) for one, kind in media.values()]
    ids, spans = expanded([3, IMAGE, 7, SOUND, 7], prepared, spec, lambda text: [], field="prompt")
    mine, wanted = (one.run(Ready(ids, spans), max_tokens=3)[0] for one in (engine, both.engine))
    compare_answers(mine, wanted)
    engine.close()
