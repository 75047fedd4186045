"""Sharded state: a checkpoint with the parameters of each rank as the model holds them, so that a
rank reads its own files from end to end and cuts nothing. `headrace shard` writes it.

Files are called model-rank-R-part-P.safetensors. Names and shapes are this program's own: what it
was not written for is refused by name.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.back.models.load.fill import COPY_THREADS, scan
from headrace.back.models.load.readers import reader_of
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.weights import Param, WeightPlan
from headrace.back.platforms.device_threads import device_pool
from headrace.base.config.weight_files import WeightFiles, natural_key
from headrace.base.errors import CheckpointError

PART_BYTES = 4 << 30
_NAME = re.compile(r"model-rank-(\d{1,4})-part-(\d{1,4})\.safetensors")


def rank_files(folder: Path) -> dict[int, tuple[Path, ...]]:
    """Rank -> its files in order; empty for another kind of checkpoint."""
    ranks: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("model-rank-*.safetensors"), key=lambda p: natural_key(p.name)):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            ranks.setdefault(int(match[1]), []).append(path)
    return {rank: tuple(paths) for rank, paths in sorted(ranks.items())}


def open_shards(folder: Path, *, rank: int, ranks: int, reader: str) -> SafetensorsSource:
    """The files of one rank; CheckpointError unless the folder has those of so many ranks."""
    by_rank = rank_files(folder)
    if sorted(by_rank) != list(range(ranks)):
        there = ", ".join(map(str, by_rank)) or "none"
        raise CheckpointError(
            f"{folder}: has the shards of ranks {there}; --tensor-parallel {ranks} needs 0 to "
            f"{ranks - 1}. Write them with headrace shard --tensor-parallel {ranks}"
        )
    return SafetensorsSource(folder, reader_of(reader, None), WeightFiles(files=by_rank[rank]))


def check_shards(plan: WeightPlan, source: SafetensorsSource) -> None:
    """CheckpointError unless the files hold this rank's parameters and nothing else."""
    wanted = {param.name: tuple(_tensor(param).shape) for param in plan.params}
    stored = {name: entry.shape for name, entry in source.entries.items()}
    wrong = [f"{name} is missing" for name in wanted if name not in stored]
    wrong += [f"{name} is unknown to the model" for name in stored if name not in wanted]
    wrong += [
        f"{name} has the shape {list(stored[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if stored.get(name, shape) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{source.where}: {'; '.join(wrong[:5])}{more}")


def fill_shards(plan: WeightPlan, source: SafetensorsSource, *, scan_finite: bool) -> None:
    """Reads every parameter as a whole, in the order of the files."""

    def one(param: Param) -> None:
        tensor = _tensor(param)
        shape = tuple(tensor.shape)
        source.copy(param.name, shape, tuple(slice(0, size) for size in shape), tensor)
        if scan_finite:
            scan(param.name, source, tensor)
        param.filled()

    params = sorted(plan.params, key=lambda param: source.entries[param.name].order)
    with device_pool(COPY_THREADS, "load") as pool:
        list(pool.map(one, params))


def save_shards(plan: WeightPlan, folder: Path, *, rank: int) -> int:
    """Writes the files of one rank; their bytes of tensors."""
    waiting: dict[str, torch.Tensor] = {}
    part = size = total = 0
    for param in plan.params:
        tensor = _tensor(param).contiguous()
        if waiting and size + tensor.nbytes > PART_BYTES:
            save_file(waiting, folder / f"model-rank-{rank}-part-{part}.safetensors")
            waiting, size, part = {}, 0, part + 1
        waiting[param.name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    save_file(waiting, folder / f"model-rank-{rank}-part-{part}.safetensors")
    return total


def _tensor(param: Param) -> torch.Tensor:
    if param.tensor is None:
        raise CheckpointError(
            f"{param.name} is stored quantized; sharded state is of plain weights"
        )
    return param.tensor
