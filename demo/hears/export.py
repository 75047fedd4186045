"""Writes the shipped files of a checkpoint of the model that hears, in transformers' layout.

python -m demo.hears.export --state runs/hears/state.pt --out demo/models/speech
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.hears.model import HearingShape
from demo.hears.tokens import CONTROL, ID, SECONDS
from demo.hears.voices import RATE
from headrace.front.media.log_mel import HOP, WINDOW

MOST_BYTES = 4_500_000
END, START = ID["<|endoftext|>"], ID["<|startoftranscript|>"]
LANGUAGES = ("<|en|>", "<|de|>")


def hub_config(shape: HearingShape) -> dict[str, object]:
    """The `config.json`."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        **asdict(shape),
        "num_hidden_layers": shape.encoder_layers,
        "activation_function": "gelu",
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "begin_suppress_tokens": None,
        "dtype": "bfloat16",
    }


def generation_config() -> dict[str, object]:
    """The `generation_config.json`: no control token but the end is ever said."""
    return {
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "suppress_tokens": [ID[name] for name in CONTROL if ID[name] != END],
        "begin_suppress_tokens": [],
        "is_multilingual": True,
        "lang_to_id": {name: ID[name] for name in LANGUAGES},
        "task_to_id": {"transcribe": ID["<|transcribe|>"], "translate": ID["<|translate|>"]},
        "no_timestamps_token_id": ID["<|notimestamps|>"],
        "prev_sot_token_id": ID["<|startofprev|>"],
        "max_initial_timestamp_index": 50 * SECONDS,
        "max_length": HearingShape().max_target_positions,
        "return_timestamps": False,
    }


def hub_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the hub's names: convolutions in their shape, without the letters' head."""
    found = {name: tensor for name, tensor in state.items() if not name.startswith("letters.")}
    for name in ("model.encoder.conv1.weight", "model.encoder.conv2.weight"):
        found[name] = found[name].view(len(found[name]), -1, 3)
    return found


def export(state: dict[str, Tensor], tokenizer: Path, folder: Path) -> None:
    """Weights, configurations and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in hub_weights(state).items()}
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size <= MOST_BYTES, file.stat().st_size
    if tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copy(tokenizer, folder / "tokenizer.json")
    shape = HearingShape()
    _write(folder / "config.json", hub_config(shape))
    _write(folder / "generation_config.json", generation_config())
    settings = {
        "tokenizer_class": "WhisperTokenizer", "model_max_length": shape.max_target_positions,
        "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    _write(folder / "tokenizer_config.json", settings)
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": shape.num_mel_bins, "sampling_rate": RATE, "hop_length": HOP, "n_fft": WINDOW,
        "chunk_length": SECONDS, "n_samples": RATE * SECONDS, "nb_max_frames": 100 * SECONDS,
        "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
    }  # fmt: skip
    _write(folder / "preprocessor_config.json", sound)


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Reads the flags and exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("demo/models/speech/tokenizer.json"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    state = torch.load(arguments.state, map_location="cpu", weights_only=True)
    export(state, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
