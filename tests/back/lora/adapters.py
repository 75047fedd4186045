"""Adapters written as PEFT writes them, and the same merged into a model of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    # as peft 0.21 saves it
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "tiny", "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.0,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": [], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "use_bdlora": None, "velora_config": None,
    "kasa_config": None, "lora_ga_config": None, "monteclora_config": None,
}  # fmt: skip


@dataclass
class Adapter:
    """Matrices by module: (A [R, I], B [O, R]), and what B(A x) is multiplied with."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)


def write_adapter(
    folder: Path,
    sizes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 16,
    seed: int = 0,
    size: float = 0.4,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Adapter:
    """An adapter of random matrices for modules of these (outputs, inputs); `config` overrides keys
    of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    written = {**CONFIG, "r": rank, "lora_alpha": alpha}
    written["target_modules"] = sorted({name.rpartition(".")[2] for name in sizes})
    written |= config
    adapter, tensors = Adapter(), {}
    for name, (outputs, inputs) in sizes.items():
        mine = next((r for end, r in written["rank_pattern"].items() if name.endswith(end)), rank)
        a = torch.randn(mine, inputs, generator=generator) * (size / inputs**0.5)
        b = torch.randn(outputs, mine, generator=generator) * (size / mine**0.5)
        a, b = a.to(dtype), b.to(dtype)
        own = next((v for end, v in written["alpha_pattern"].items() if name.endswith(end)), alpha)
        root = math.sqrt(mine) if written["use_rslora"] else mine
        adapter.pairs[name] = (a, b)
        adapter.scales[name] = own / root
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return adapter


def merge(model: Any, adapter: Adapter, sign: float = 1.0) -> None:
    """Adds what the adapter does to the weights of a model of transformers; -1 takes it off."""
    with torch.no_grad():
        for name, (a, b) in adapter.pairs.items():
            module = model.get_submodule(name)
            delta = (b.float() @ a.float()) * adapter.scales[name] * sign
            turned = type(module).__name__ == "Conv1D"
            module.weight += (delta.T if turned else delta).to(module.weight.dtype)


def module_sizes(model: Any) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear layer of our model that takes adapters."""
    return {
        name: (module.outputs, module.inputs)
        for linear in model.adapters.linears
        for name, module in linear.modules.items()
    }
