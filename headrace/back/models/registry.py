"""Which code builds a model: architecture name in config.json -> family -> module.

A family is a row here and a file beside this one. What no row names goes to the `transformers`
fallback, if that library knows it; the choice is a decision, never silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.back.layers.scope import Ledger, Scope
from headrace.back.models.blocks import BuildFamily
from headrace.back.models.protocol import LoadableModel
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError
from headrace.base.registry import Registry

FALLBACK = "transformers"

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
}

FAMILIES: Registry[BuildFamily] = Registry(
    "model family",
    {
        name: f"headrace.back.models.{name}:build"
        for name in (*sorted(set(ARCHITECTURES.values())), FALLBACK)
    },
)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a config.json: that of the first architecture it names, else the fallback."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise CheckpointError(
            f"config.json: architectures is {names!r}; it must be a list of class names",
            field="architectures",
        )
    return ARCHITECTURES.get(names[0], FALLBACK)


def build_model(
    spec: ModelSpec, *, mesh: Mesh, device: torch.device, block_tokens: int
) -> LoadableModel:
    """An empty model on `device`: its weights are to be loaded (`model.weights`), then
    `finish_load` makes it ready.

    `block_tokens` is the KV block size, which attention kernels are chosen for.
    """
    scope = Scope(
        ledger=Ledger(),
        mesh=mesh,
        device=device,
        dtype=DTYPES[spec.dtype],
        block_tokens=block_tokens,
        max_positions=spec.max_model_len,
    )
    return FAMILIES.load(spec.family)(scope, ConfigReader(spec.config, "config.json"))
