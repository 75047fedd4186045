"""Writes a plain checkpoint with a low-rank adapter merged into its weights: W + s B A, summed in
float32 and rounded once. Everything else of the base is copied as it is."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from headrace.back.layers.adapters import AdaptedModule, LowRank
from headrace.back.lora.peft import read_adapter
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.load.source import name_of
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.resolved import AdapterSpec, ModelSpec
from headrace.base.errors import ConfigError
from headrace.launch.plan import build_without_memory
from headrace.launch.quantize import Progress, Shards, check_out, copy_rest, tensors_of

MAX_RANK = 512


@dataclass(frozen=True, kw_only=True)
class Merged:
    """How many matrices were changed, the adapter's greatest rank, and the bytes written."""

    num_matrices: int
    rank: int
    num_bytes: int


def merge_adapter(
    spec: ModelSpec, adapter: Path, out: Path, progress: Progress = lambda name, size: None
) -> Merged:
    """Writes `out`, a folder that must be new or empty. CheckpointError if the adapter does not fit
    the base, ConfigError if the base is no plain safetensors."""
    if spec.format != "safetensors" or stored_quantization(spec.config, "config.json") is not None:
        raise ConfigError(
            f"{spec.path}: adapters are merged into plain safetensors; this is "
            f"{spec.format if spec.format != 'safetensors' else 'quantized'}",
            field="MODEL",
        )
    check_out(out)
    modules, renamed = _modules(spec)
    pairs = dict(read_adapter(adapter, modules, max_rank=MAX_RANK).pairs)
    rank, count, num_bytes = max(len(pair.a_RI) for pair in pairs.values()), len(pairs), 0
    out.mkdir(parents=True, exist_ok=True)
    shards = Shards(out)
    with closing(SafetensorsSource(Path(spec.path))) as source:
        for name, tensor in tensors_of(source):
            module = name_of(name, renamed).removesuffix(".weight")
            if (pair := pairs.pop(module, None)) is not None:
                tensor = _merged(tensor, pair, modules[module])
            shards.add(name, tensor)
            num_bytes += tensor.nbytes
            progress(name, tensor.nbytes)
    if pairs:
        raise ConfigError(
            f"{spec.path}: holds no tensor of its own for {', '.join(sorted(pairs)[:4])}",
            field="ADAPTER",
        )
    shards.close()
    copy_rest(Path(spec.path), out)
    return Merged(num_matrices=count, rank=rank, num_bytes=num_bytes)


def _modules(
    spec: ModelSpec,
) -> tuple[dict[str, AdaptedModule], tuple[tuple[str, str], ...]]:
    """The linear layers that take adapters, and what the model calls tensors of other names."""
    slots = AdapterSpec(slots=1, max_rank=1, kept=1, roots=(), modules=())
    model = build_without_memory(msgspec.structs.replace(spec, adapters=slots), block_tokens=16)
    assert model.adapters is not None
    modules = {
        name: module for one in model.adapters.linears for name, module in one.modules.items()
    }
    return modules, model.weights.renamed


def _merged(weight: torch.Tensor, pair: LowRank, module: AdaptedModule) -> torch.Tensor:
    """`weight` [O, I], or [I, O] where the checkpoint holds it so."""
    more_OI = (pair.b_OR.float() @ pair.a_RI.float()) * pair.scale
    more = more_OI.t() if module.pieces[0].transposed else more_OI
    return (weight.float() + more).to(weight.dtype)
