"""Loads the dense modules that stand beside a checkpoint in folders of their own (`linear.weight`,
`linear.bias`)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final

import torch

from headrace.back.layers.pooling import DenseModule, Projection
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.base.config.pooling import DenseSpec
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError

USES: Final = ("pooled", "tokens", "every", "weights")


def load_projection(spec: ModelSpec, device: torch.device) -> Projection | None:
    """The model's dense modules; a tensor that is missing or has another shape is a
    CheckpointError."""
    if not spec.dense:
        return None
    folder = Path(spec.path)
    return Projection(
        **{
            use: tuple(
                _module(folder / one.path, one, device) for one in spec.dense if one.of == use
            )
            for use in USES
        }
    )


def _module(folder: Path, spec: DenseSpec, device: torch.device) -> DenseModule:
    with closing(SafetensorsSource(folder)) as source:
        weight_OI = _tensor(source, f"{spec.name}.weight", (spec.outputs, spec.inputs))
        bias_O = _tensor(source, f"{spec.name}.bias", (spec.outputs,)) if spec.bias else None
    return DenseModule(
        weight_OI=weight_OI.to(device),
        bias_O=None if bias_O is None else bias_O.to(device),
        activation=spec.activation,
    )


def _tensor(source: SafetensorsSource, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    entry = source.entries.get(name)
    if entry is None or entry.shape != shape:
        fault = "is missing" if entry is None else f"has shape {list(entry.shape)}"
        raise CheckpointError(f"{source.where}: {name} {fault}; its config.json says {list(shape)}")
    values = torch.empty(shape, dtype=torch.float32)
    source.copy(name, shape, tuple(slice(0, size) for size in shape), values)
    return values
