"""Writes a plain checkpoint with a low-rank adapter merged into its weights: W + s B A, summed in
float32 and rounded once; magnitudes, experts, tables and whole tensors too (back/lora/whole.py).
Everything else of the base is copied as it is. A table of more tokens than the base's comes with
its number in config.json, and with the adapter's tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.back.lora.whole import Change, WholeAdapter, changes_of, read_whole
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.load.source import name_of
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.resolved import AdapterSpec, ModelSpec
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.plan import build_without_memory
from headrace.launch.quantize import Progress, Shards, check_out, copy_rest, tensors_of


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
    transposed, renamed = _modules(spec)
    stored = read_whole(adapter)
    count, tokens, num_bytes = 0, 0, 0
    with closing(SafetensorsSource(Path(spec.path))) as source:
        names = {name_of(name, renamed): name for name in source.entries}
        changes = _changes(spec, stored, transposed, names)
        out.mkdir(parents=True, exist_ok=True)
        shards = Shards(out)
        for name, tensor in tensors_of(source):
            before = tensor.shape
            for change in changes.get(name_of(name, renamed), ()):
                tensor = change(tensor)
            if tensor.shape != before:
                tokens = _grown(name, before, tensor.shape)
            count += name_of(name, renamed) in changes
            shards.add(name, tensor)
            num_bytes += tensor.nbytes
            progress(name, tensor.nbytes)
    shards.close()
    copy_rest(Path(spec.path), out, **({"vocab_size": tokens} if tokens else {}))
    _copy_tokenizer(adapter, out)
    return Merged(num_matrices=count, rank=stored.rank, num_bytes=num_bytes)


def _changes(
    spec: ModelSpec, adapter: WholeAdapter, transposed: frozenset[str], names: Collection[str]
) -> dict[str, list[Change]]:
    """What becomes of the base's tensors, each of which must be there."""
    changes = changes_of(adapter, transposed=transposed, experts=_experts(spec.config))
    lone = {
        name
        for parameter in adapter.experts
        for name in changes
        if name.startswith(f"{parameter.rpartition('.')[0]}.") and name not in names
    }  # experts lie in one tensor or one by one
    missing = sorted(name for name in changes.keys() - set(names) if name not in lone)
    if missing or len(lone) == len(changes):
        raise CheckpointError(
            f"{spec.path}: holds no tensor of its own for {', '.join(missing[:4] or sorted(lone)[:4])} "
            "(the adapter may be made for another base)",
            field="ADAPTER",
        )
    return changes


def _experts(config: Mapping[str, Any]) -> int:
    text = config.get("text_config") or config
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((int(text[key]) for key in keys if text.get(key)), 0)


def _grown(name: str, before: torch.Size, after: torch.Size) -> int:
    """The tokens of a table that was replaced by a longer one."""
    if len(before) != 2 or before[1:] != after[1:]:
        raise CheckpointError(
            f"{name}: the adapter replaces {list(before)} by {list(after)}", field="ADAPTER"
        )
    return after[0]


def _copy_tokenizer(adapter: Path, out: Path) -> None:
    """That of the adapter, where it has one: it may know more tokens."""
    if (adapter / "tokenizer.json").is_file():
        for path in adapter.glob("*token*.json"):
            shutil.copyfile(path, out / path.name)


def _modules(spec: ModelSpec) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """The linear layers whose weights lie [I, O], and what the model calls tensors of other
    names."""
    slots = AdapterSpec(slots=1, max_rank=1, kept=1, roots=(), modules=())
    model = build_without_memory(msgspec.structs.replace(spec, adapters=slots), block_tokens=16)
    linears = () if model.adapters is None else model.adapters.linears
    turned = frozenset(
        name
        for one in linears
        for name, module in one.modules.items()
        if module.pieces[0].transposed
    )
    return turned, model.weights.renamed
