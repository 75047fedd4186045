"""Writes the shipped files of a checkpoint of the model with experts, under the published names.

python -m demo.mixture.export --state runs/mixture/state.pt --out demo/models/mixture
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

from demo.mixture.model import MixtureShape

MOST_BYTES = 6_000_000
END, PAD = "<|im_end|>", "<|endoftext|>"


def hub_config(shape: MixtureShape, *, eos: int, pad: int) -> dict[str, object]:
    """The `config.json`."""
    sizes = asdict(shape)
    latent = sizes.pop("latent_layers")
    layers = range(shape.num_hidden_layers)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **sizes,
        "num_key_value_heads": shape.num_attention_heads,
        "head_dim": shape.qk_rope_head_dim,
        "layer_types": ["full_attention" if i in latent else "linear_attention" for i in layers],
        "mlp_layer_types": ["dense" if i == 0 else "sparse" for i in layers],
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "q_lora_rank": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }


def hub_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in the published shapes: convolutions [channels, 1, taps], decays [1, 1, heads, 1]."""
    found = {}
    for name, tensor in state.items():
        if "conv1d" in name:
            tensor = tensor[:, None]
        elif name.endswith("A_log"):
            tensor = tensor.view(1, 1, -1, 1)
        found[name] = tensor
    return found


def export(state: dict[str, Tensor], tokenizer: Path, folder: Path) -> None:
    """Weights and configurations; tokenizer and template are the bundled model's, in the folder `tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in hub_weights(state).items()}
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size <= MOST_BYTES, file.stat().st_size
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = generation["eos_token_id"]
    config = hub_config(MixtureShape(), eos=ends[0], pad=ends[1])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Reads the flags and exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("demo/model"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    state = torch.load(arguments.state, map_location="cpu", weights_only=True)
    export(state, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
