"""Adapters written as PEFT writes them, and the same merged into a model of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


def write_kinds(folder: Path, model: Any, *, seed: int, rank: int = 4, dora: bool = True) -> None:
    """An adapter of random matrices for everything that our model takes: magnitudes of linear layers, its table
    and head, its shared experts, and of the routed ones each (odd seeds) or as parameters."""
    generator = torch.Generator().manual_seed(seed)
    each = seed % 2 == 1
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, a: tuple[int, int], b: tuple[int, int], ends: tuple[str, str]) -> None:
        for shape, end in zip((a, b), ends, strict=True):
            values = torch.randn(shape, generator=generator) * 0.4 / shape[-1] ** 0.5
            tensors[f"base_model.model.{name}.{end}"] = values

    modules = {name: m for layer in model.adapters.layers for name, m in layer.modules.items()}
    linear = ("lora_A.weight", "lora_B.weight")
    for name, module in modules.items():
        inputs, outputs, ranks = module.inputs, module.outputs, rank * module.experts
        numbered = any(part.isdigit() for part in name.rpartition(".experts.")[2].split("."))
        if module.kind == "table":
            ends = ("lora_embedding_A", "lora_embedding_B")
            put(name, (rank, inputs), (outputs, rank), ends)
        elif module.kind == "parameter" and not each:
            owner, _, leaf = name.rpartition(".")
            inside = ".base_layer" if leaf != "down_proj" else ""
            put(owner + inside, (ranks, inputs), (outputs, ranks), linear)
        elif module.kind == "linear" and (each or module.parts or not numbered):
            put(name, (rank, inputs), (outputs, rank), linear)
            if dora and module.parts:
                lengths = torch.rand(outputs, generator=generator) + 0.5
                tensors[f"base_model.model.{name}.lora_magnitude_vector"] = lengths
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {**CONFIG, "r": rank, "use_dora": dora, "target_modules": "all-linear"}
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    config |= {} if each else {"target_parameters": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merge_kinds(model: Any, folder: Path) -> None:
    """What an adapter of `write_kinds` does, in the weights of a model of transformers."""
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = CONFIG["lora_alpha"] / json.loads((folder / "adapter_config.json").read_text())["r"]
    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for key, a in tensors.items():
            name = key.removeprefix("base_model.model.")
            if name.endswith(".lora_embedding_A"):
                b = tensors[key[:-1] + "B"]
                model.get_submodule(name.removesuffix(".lora_embedding_A")).weight += (
                    scale * (b @ a).T
                )
            elif name.endswith(".lora_A.weight"):
                b = tensors[key.replace("lora_A", "lora_B")]
                _merge_linear(model, name.removesuffix(".lora_A.weight"), a, b, scale, tensors)


def _merge_linear(
    model: Any, name: str, a: torch.Tensor, b: torch.Tensor, scale: float, tensors: Any
) -> None:
    owner, _, rest = name.rpartition(".experts")
    if rest in (".base_layer", "") and owner:
        weight = getattr(
            model.get_submodule(f"{owner}.experts"), "gate_up_proj" if rest else "down_proj"
        )
        for expert in range(len(weight)):
            rows = a.view(len(weight), -1, a.shape[1])[expert]
            weight[expert] += scale * b[:, expert :: len(weight)] @ rows
        return
    if owner and rest.split(".")[1].isdigit():
        _, number, leaf = rest.split(".")
        fused = "down_proj" if leaf == "down_proj" else "gate_up_proj"
        weight = getattr(model.get_submodule(f"{owner}.experts"), fused)[int(number)]
        half = len(weight) // 2
        at = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}.get(leaf, slice(None))
        weight[at] += scale * b @ a
        return
    weight = model.get_submodule(name).weight
    weight += scale * b @ a
    magnitude = tensors.get(f"base_model.model.{name}.lora_magnitude_vector")
    if magnitude is not None:
        weight *= (magnitude / weight.norm(dim=1))[:, None]
