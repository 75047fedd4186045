"""Checkpoints that come with a low-rank adapter for each task, of which one is merged into the
weights as they are read: W + (alpha / r) B A, summed in float32 and rounded once.

Jina Embeddings v5: `adapters/TASK` as PEFT saves them; `jina_task` in config.json names the task,
retrieval unless it does. O outputs, I inputs, R rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from headrace.back.models.load.readers import BufferedReader, Reader
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.pooling_families import JINA_V5
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.resolved import Decision
from headrace.base.config.weight_files import WeightFiles
from headrace.base.errors import CheckpointError

TASKS = ("retrieval", "text-matching", "classification", "clustering")
PREFIXES = ("base_model.model.", "model.")
MAX_RANK = 4096


class MergedSource(SafetensorsSource):
    """A checkpoint's tensors with an adapter in them."""

    def __init__(self, folder: Path, adapter: Path, reader: Reader | None = None) -> None:
        super().__init__(folder, reader)
        try:
            self._pairs, self._scale = _read(adapter)
            self._check(adapter)
        except CheckpointError:
            self.close()
            raise
        self.decision = Decision(
            "adapter", "auto", adapter.name, f"{len(self._pairs)} matrices of {adapter} are merged"
        )

    def copy(
        self, name: str, shape: tuple[int, ...], source: tuple[slice, ...], target: torch.Tensor
    ) -> None:
        """See SafetensorsSource."""
        pair = self._pairs.get(_plain(name))
        if pair is None:
            super().copy(name, shape, source, target)
            return
        a_RI, b_OR = pair
        merged = torch.empty(target.shape, dtype=torch.float32)
        super().copy(name, shape, source, merged)
        rows, columns = (*source, slice(None), slice(None))[:2]
        merged += ((b_OR[rows] @ a_RI[:, columns]) * self._scale).view(merged.shape)
        target.copy_(merged)

    def _check(self, adapter: Path) -> None:
        shapes = {_plain(name): entry.shape for name, entry in self.entries.items()}
        for name, (a_RI, b_OR) in self._pairs.items():
            if shapes.get(name) != (b_OR.shape[0], a_RI.shape[1]):
                raise CheckpointError(
                    f"{adapter}: changes {name} as {[b_OR.shape[0], a_RI.shape[1]]}, of which the "
                    f"checkpoint has {list(shapes.get(name, ()))}",
                    field="jina_task",
                )


def adapter_of(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """The adapter to be merged; None: the architecture has none."""
    if (config.get("architectures") or [None])[0] != JINA_V5:
        return None
    task = ConfigReader(config, "config.json").choice("jina_task", TASKS, TASKS[0])
    path = folder / "adapters" / task
    if not path.is_dir():
        raise CheckpointError(f"{path} is missing: the adapter of task {task}", field="jina_task")
    return path


def _plain(name: str) -> str:
    """A tensor's name without what may stand around the whole model."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read(adapter: Path) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], float]:
    """Both factors of each matrix, by its name, and what their product is multiplied with."""
    path = adapter / "adapter_config.json"
    config = ConfigReader(read_json(path), str(path))
    config.choice("peft_type", ("LORA",))
    config.choice("bias", ("none",), "none")
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.raw.get(key):
            raise config.wrong(key, "off: plain low-rank adapters alone are merged")
    rank = config.int("r", ge=1, le=MAX_RANK)
    factors: dict[str, dict[str, torch.Tensor]] = {}
    weights = adapter / "adapter_model.safetensors"
    files = WeightFiles(files=(weights,))
    with closing(SafetensorsSource(adapter, BufferedReader(), files)) as source:
        for name, entry in source.entries.items():
            base, _, part = name.partition(".lora_")
            if part not in ("A.weight", "B.weight") or len(entry.shape) != 2:
                raise CheckpointError(f"{weights}: {name} is no factor of a matrix")
            if entry.shape[part == "B.weight"] != rank:
                raise CheckpointError(f"{weights}: {name} is {list(entry.shape)}; r is {rank}")
            values = torch.empty(entry.shape)
            source.copy(name, entry.shape, (slice(None), slice(None)), values)
            factors.setdefault(f"{_plain(base)}.weight", {})[part[0]] = values
    lone = [name for name, pair in factors.items() if len(pair) != 2]
    if lone or not factors:
        raise CheckpointError(f"{weights}: {lone[0] if lone else 'nothing'} has both factors")
    pairs = {name: (pair["A"], pair["B"]) for name, pair in factors.items()}
    return pairs, config.float("lora_alpha", 8.0) / rank
