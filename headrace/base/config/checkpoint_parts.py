"""Checkpoints parts of which lie in folders of their own below the model's, each with its
config.json and its weights. The tensors of a part are known by the folder's name before their own.

Kimi-Audio: its encoder comes with it; the reference fetches what makes tokens of sound from
THUDM/glm-4-voice-tokenizer, which has to be put beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.config.hf import read_json
from headrace.base.config.weight_files import WeightFiles, find_weight_files
from headrace.base.errors import CheckpointError

ENCODER, SPEECH_TOKENIZER = "whisper-large-v3", "glm-4-voice-tokenizer"
PARTS: Mapping[str, Mapping[str, str]] = {
    "kimi_audio": {ENCODER: "audio_config", SPEECH_TOKENIZER: "speech_tokenizer_config"}
}
"""By `model_type`: folder -> the section that its config.json becomes."""


def parts_of(config: Mapping[str, Any]) -> Mapping[str, str]:
    """The folders of a model's parts."""
    return PARTS.get(str(config.get("model_type")), {})


def with_parts(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with those of its parts; one that is not there is a CheckpointError."""
    for name, section in parts_of(config).items():
        path = folder / name / "config.json"
        if section in config:
            continue
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: this model needs the folder {name} with config.json and "
                "model.safetensors below its own",
                field=section,
            )
        config[section] = read_json(path)
    return config


def all_weight_files(
    folder: Path, config: Mapping[str, Any], files: WeightFiles | None = None
) -> WeightFiles:
    """The files of a model and of its parts; CheckpointError as find_weight_files."""
    files = files or find_weight_files(folder)
    for name in parts_of(config):
        more = find_weight_files(folder / name)
        prefixes = {**files.prefixes, **dict.fromkeys(more.files, f"{name}.")}
        files = replace(files, files=(*files.files, *more.files), prefixes=prefixes)
    return files
