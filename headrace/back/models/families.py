"""Architecture name in config.json -> family. Apart from `registry.py`, so that `launch` can ask
without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import CheckpointError

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


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a config.json: that of the first architecture it names, else the fallback."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise CheckpointError(
            f"config.json: architectures is {names!r}; it must be a list of class names",
            field="architectures",
        )
    return ARCHITECTURES.get(names[0], FALLBACK)
