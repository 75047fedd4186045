"""Writes the shipped files of a checkpoint: bf16 weights and the two configurations.

python -m demo.export --state runs/demo/state.pt --out demo/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo.decoder import Shape
from demo.train_tokenizer import write

_MOST_BYTES = 24_000_000


def export(state_file: Path, folder: Path) -> None:
    """Weights, `config.json` and `generation_config.json` beside the tokenizer in `folder`."""
    state = torch.load(state_file, map_location="cpu", weights_only=True)
    shape = Shape(**state["shape"])
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in state["model"].items()}
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size <= _MOST_BYTES, file.stat().st_size
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    write(tokenizer, folder, context=shape.max_position_embeddings)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    _write_json(folder / "config.json", shape.hub_config(eos=end, pad=pad))
    generation = {
        "do_sample": True, "temperature": 0.7, "top_p": 0.9,
        "eos_token_id": [end, pad], "pad_token_id": pad,
    }  # fmt: skip
    _write_json(folder / "generation_config.json", generation)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Reads the flags and exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.state, arguments.out)


if __name__ == "__main__":
    main()
