"""Heads of the bundled model with random weights, by the names of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTH, HEADS, KV_HEADS, DIM, INNER, TOKENS = 384, 4, 2, 64, 96, 4096
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
}
KNOWN = 500
CHAIN = 256
CHAIN_KEYS = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "hidden_size": None,
    "emb_dim": WIDTH,
    "inner_dim": CHAIN,
    "n_predict": 3,
}
MASK, RANK = 4000, 16


def save_head(folder: Path, kind: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Writes the head of a kind (a row of MAKE): "eagle3-shared" has no output head of its own,
    "medusa" has some, "medusa-shared" is by its authors' names. Its tensors in float32. `changes`:
    to its config."""
    torch.manual_seed(len(kind))
    tensors = MAKE[kind]()
    tensors = {name: weight.contiguous() for name, weight in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, **OWN_KEYS.get(kind, {}), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def _matrix(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs) * 1.5 * inputs**-0.5


def _norm() -> torch.Tensor:
    return 1 + 0.3 * torch.randn(WIDTH)


def _layer(prefix: str, inputs: int) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * DIM, inputs),
        "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    layer = {f"{prefix}.{name}.weight": _matrix(*shape) for name, shape in shapes.items()}
    return layer | {f"{prefix}.post_attention_layernorm.weight": _norm()}


def _eagle3(*, own_head: bool = True) -> dict[str, torch.Tensor]:
    known = torch.randperm(TOKENS)[:KNOWN].sort().values
    tensors = _layer("midlayer", 2 * WIDTH) | {
        "fc.weight": _matrix(WIDTH, 3 * WIDTH),
        "midlayer.input_layernorm.weight": _norm(),
        "midlayer.hidden_norm.weight": _norm(),
        "norm.weight": _norm(),
        "d2t": known - torch.arange(KNOWN),
        "t2d": torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, known, True),
    }
    return tensors | ({"lm_head.weight": _matrix(KNOWN, WIDTH)} if own_head else {})


def _eagle() -> dict[str, torch.Tensor]:
    tensors = _layer("layers.0", WIDTH)
    return tensors | {
        "embed_tokens.weight": _matrix(TOKENS, WIDTH),
        "fc.weight": _matrix(WIDTH, 2 * WIDTH),
        "fc.bias": 0.1 * torch.randn(WIDTH),
    }


def _mtp() -> dict[str, torch.Tensor]:
    return _layer("mtp.layers.0", WIDTH) | {
        "mtp.fc.weight": _matrix(WIDTH, 2 * WIDTH),
        "mtp.pre_fc_norm_embedding.weight": _norm(),
        "mtp.pre_fc_norm_hidden.weight": _norm(),
        "mtp.layers.0.input_layernorm.weight": _norm(),
        "mtp.layers.0.self_attn.q_norm.weight": 1 + 0.3 * torch.randn(DIM),
        "mtp.layers.0.self_attn.k_norm.weight": 1 + 0.3 * torch.randn(DIM),
        "mtp.norm.weight": _norm(),
    }


def _medusa() -> dict[str, torch.Tensor]:
    tensors = {}
    for head in range(4):
        tensors[f"blocks.{head}.layers.0.weight"] = _matrix(WIDTH, WIDTH)
        tensors[f"lm_heads.{head}.weight"] = _matrix(TOKENS, WIDTH)
    return tensors


def _medusa_shared() -> dict[str, torch.Tensor]:
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = _matrix(WIDTH, WIDTH)
        tensors[f"{head}.0.linear.bias"] = 0.3 * torch.randn(WIDTH)
    return tensors


def _chain(*, tied: bool = False) -> dict[str, torch.Tensor]:
    """Three heads, with states of another width."""
    tensors = {}
    for head in range(3):
        own = {
            f"emb.{head}.weight": _matrix(TOKENS, CHAIN),
            f"head.{head}.weight": _matrix(TOKENS, CHAIN),
            f"ln.{head}.weight": 1 + 0.3 * torch.randn(CHAIN),
            f"ln.{head}.bias": 0.3 * torch.randn(CHAIN),
        }
        if head == 0 or not tied:
            tensors |= own
        if head < 2 or not tied:
            tensors[f"proj.{head}.weight"] = _matrix(CHAIN, CHAIN if head else WIDTH)
    return {f"speculator.{name}": tensor for name, tensor in tensors.items()}


def _dflash() -> dict[str, torch.Tensor]:
    tensors = {
        "fc.weight": _matrix(WIDTH, 2 * WIDTH),
        "hidden_norm.weight": _norm(),
        "norm.weight": _norm(),
    }
    for layer in ("layers.0", "layers.1"):
        tensors |= _layer(layer, WIDTH) | {
            f"{layer}.input_layernorm.weight": _norm(),
            f"{layer}.self_attn.q_norm.weight": 1 + 0.3 * torch.randn(DIM),
            f"{layer}.self_attn.k_norm.weight": 1 + 0.3 * torch.randn(DIM),
        }
    return tensors


def _dspark() -> dict[str, torch.Tensor]:
    """With what is not read: copies of the model's tables and a confidence head."""
    return _dflash() | {
        "markov_head.markov_w1.weight": _matrix(TOKENS, RANK),
        "markov_head.markov_w2.weight": 8 * _matrix(TOKENS, RANK),
        "confidence_head.proj.weight": _matrix(1, WIDTH + RANK),
        "confidence_head.proj.bias": torch.zeros(1),
        "embed_tokens.weight": torch.zeros(TOKENS, WIDTH),
        "lm_head.weight": torch.zeros(TOKENS, WIDTH),
    }


MAKE = {
    "eagle3": _eagle3,
    "eagle3-shared": lambda: _eagle3(own_head=False),
    "eagle": _eagle,
    "mtp": _mtp,
    "medusa": _medusa,
    "medusa-shared": _medusa_shared,
    "dflash": _dflash,
    "dspark": _dspark,
    "dspark-plain": _dflash,
    "mlp_speculator": _chain,
    "mlp_speculator-tied": lambda: _chain(tied=True),
}
OWN_KEYS: dict[str, dict[str, Any]] = {
    "mlp_speculator": CHAIN_KEYS,
    "mlp_speculator-tied": {**CHAIN_KEYS, "tie_weights": True, "scale_input": True},
    "eagle3": {"draft_vocab_size": KNOWN},
    "eagle3-shared": {
        "draft_vocab_size": KNOWN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
    },
    "eagle": {"architectures": ["LlamaForCausalLMEagle"]},
    "mtp": {"architectures": ["Qwen3MTP"], "model_type": "qwen3"},
    "medusa": {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 4},
    "medusa-shared": {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3},
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4]},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 4],
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    },
    "dspark-plain": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**CONFIG, "model_type": "qwen3", "num_hidden_layers": 2},
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 5],
        "draft_vocab_size": TOKENS,
        "markov_rank": 0,
    },
}
