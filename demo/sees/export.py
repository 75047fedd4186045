"""Writes the shipped files of a checkpoint of the model that sees, in transformers' layout.

python -m demo.sees.export --state runs/sees/state.pt --out demo/models/vision
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from demo.sees.model import SeeingShape
from demo.sees.rows import CONTROL, CONTROL_ID, SETTINGS

MOST_BYTES = 5_000_000


def hub_config(shape: SeeingShape) -> dict[str, object]:
    """The `config.json`."""
    text = asdict(shape.decoder)
    theta = text.pop("rope_theta")
    rope = {
        "rope_type": "default",
        "rope_theta": theta,
        "mrope_section": list(shape.axes),
        "mrope_interleaved": True,
    }
    tower = asdict(shape.tower) | {
        "deepstack_visual_indexes": list(shape.tower.deepstack_visual_indexes), "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3, "out_hidden_size": shape.decoder.hidden_size, "model_type": "qwen3_vl",
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": CONTROL_ID["<|image_pad|>"],
        "video_token_id": CONTROL_ID["<|video_pad|>"],
        "vision_start_token_id": CONTROL_ID["<|vision_start|>"],
        "vision_end_token_id": CONTROL_ID["<|vision_end|>"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen3_vl_text", **text, "rope_parameters": rope, "hidden_act": "silu",
            "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True, "use_cache": True,
            "bos_token_id": None, "eos_token_id": CONTROL_ID["<|im_end|>"], "pad_token_id": CONTROL_ID["<|endoftext|>"],
        },
        "vision_config": tower,
    }  # fmt: skip


def hub_weights(state: dict[str, Tensor], shape: SeeingShape) -> dict[str, Tensor]:
    """The weights under the hub's names: the patches' matrix is a convolution there."""
    tower = shape.tower
    found = dict(state)
    patches = "model.visual.patch_embed.proj.weight"
    size = (3, tower.temporal_patch_size, tower.patch_size, tower.patch_size)
    found[patches] = found[patches].view(tower.hidden_size, *size)
    return found


def tokenizer() -> Tokenizer:
    """Bytes and control tokens."""
    alphabet = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    assert all(made.token_to_id(name) == number for name, number in CONTROL_ID.items())
    return made


def byte_symbols() -> list[str]:
    """The visible character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def export(state: dict[str, Tensor], folder: Path) -> None:
    """Weights, configurations, tokenizer and template."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SeeingShape()
    weights = {
        name: tensor.bfloat16().contiguous() for name, tensor in hub_weights(state, shape).items()
    }
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size <= MOST_BYTES, file.stat().st_size
    tokenizer().save(str(folder / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    write_json(folder / "config.json", hub_config(shape))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2TokenizerFast", "model_max_length": shape.decoder.max_position_embeddings,
            "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
            "add_bos_token": False, "add_prefix_space": False, "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )  # fmt: skip
    ends = [CONTROL_ID["<|im_end|>"], CONTROL_ID["<|endoftext|>"]]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    write_json(folder / "generation_config.json", generation)
    common = {
        "patch_size": SETTINGS.patch, "temporal_patch_size": SETTINGS.temporal, "merge_size": SETTINGS.merge,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    low, high = SETTINGS.image_pixels
    image = {
        "size": {"shortest_edge": low, "longest_edge": high},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    write_json(
        folder / "preprocessor_config.json",
        common | image | {"processor_class": "Qwen3VLProcessor"},
    )
    low, high = SETTINGS.video_pixels
    video = {
        "size": {"shortest_edge": low, "longest_edge": high}, "fps": SETTINGS.fps, "min_frames": SETTINGS.min_frames,
        "max_frames": SETTINGS.max_frames, "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    write_json(folder / "video_preprocessor_config.json", common | video)


def write_json(file: Path, value: object) -> None:
    """Indented, with a newline at the end."""
    file.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Reads the flags and exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(torch.load(arguments.state, map_location="cpu", weights_only=True), arguments.out)


if __name__ == "__main__":
    main()
