"""Writes sharded state: what each rank of a tensor-parallel group holds, a rank at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.back.models.load import open_source
from headrace.back.models.load.fill import check, fill
from headrace.back.models.load.sharded import save_shards
from headrace.back.models.load.source import renamed, separate_experts
from headrace.back.models.registry import build_model
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.resolved import ModelSpec
from headrace.base.config.weight_files import WEIGHT_SUFFIXES
from headrace.base.errors import ConfigError

BLOCK_TOKENS = 16


def shard_checkpoint(
    spec: ModelSpec, out: Path, ranks: int, progress: Callable[[int, int], None]
) -> int:
    """Writes `out`, a folder that must be new or empty; the bytes of all ranks. `progress` is told
    a rank and its bytes. ConfigError for other checkpoints than plain safetensors."""
    quantized = stored_quantization(spec.config, f"{spec.path}/config.json") is not None
    if spec.format != "safetensors" or quantized or spec.quantization is not None:
        raise ConfigError(f"{spec.path}: only plain safetensors are sharded", field="MODEL")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there, and not an empty folder", field="OUT")
    out.mkdir(parents=True, exist_ok=True)
    total = 0
    for rank in range(ranks):
        written = _write_rank(spec, out, rank, ranks)
        progress(rank, written)
        total += written
    for path in sorted(Path(spec.path).iterdir()):
        index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not index:
            shutil.copyfile(path, out / path.name)
    return total


def _write_rank(spec: ModelSpec, out: Path, rank: int, ranks: int) -> int:
    group = None
    if ranks > 1:  # nothing is summed
        group = dist.ProcessGroup(rank, ranks)  # type: ignore[call-arg]  # missing in the stub
    mesh = Mesh(tp=Axis(size=ranks, rank=rank, group=group))
    cpu = torch.device("cpu")
    model = build_model(spec, mesh=mesh, device=cpu, block_tokens=BLOCK_TOKENS)
    with closing(open_source(spec)) as opened:
        wanted = {piece.name for param in model.weights.params for piece in param.pieces}
        source = separate_experts(renamed(opened, model.weights.renamed), wanted)
        check(model.weights, source)
        fill(model.weights, source)
    return save_shards(model.weights, out, rank=rank)
