"""Replays a module of a run, a linear layer or all below a name (an attention, a layer): what goes
into its linear layers and comes out is captured while a text goes through the model, and the text
goes through the same model again with these layers as other schemes hold them, or as another device
computes them.

All that stands before the module is as it was, so the errors are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.observed import ObservedLinears
from headrace.back.models.load import load_model
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.registry import DTYPES
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.whole_text import WholeTexts
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import ConfigError

BLOCK_TOKENS = 16
CPU = torch.device("cpu")

Layers = dict[tuple[str, ...], torch.Tensor]
"""Outputs y_TO of linear layers, by the names of the weights whose outputs lie side by side, in
their order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleRun:
    """What the linear layers of a module gave for a text."""

    ids: tuple[int, ...]
    outputs: Layers


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Errors of a linear layer's outputs: the largest and the mean magnitude, and the Euclidean
    norm relative to the captured outputs'."""

    largest: float
    mean: float
    relative: float


def capture(spec: ModelSpec, module: str, ids: Sequence[int]) -> ModuleRun:
    """The linear layer of that name ("model.layers.0.mlp.down_proj"), or all below it
    ("model.layers.0.self_attn"), over a text. ConfigError if the model has none, with the names
    that it has."""
    outputs: Layers = {}

    def see(names: tuple[str, ...], x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        if any(_belongs(name, module) for name in names):
            outputs[names] = y_TO.clone()

    observed = ObservedLinears(see)
    model = _loaded(spec, observed)
    known = [name.removesuffix(".weight") for names in observed.gemms for name in names]
    if not any(_belongs(f"{name}.weight", module) for name in known):
        last = module.rsplit(".", 1)[-1]
        near = [name for name in known if name.endswith(last)] or known
        raise ConfigError(
            f"--module {module}: not among the {len(known)} linear layers, such as "
            f"{', '.join(near[:4])}, nor above one",
            field="--module",
        )
    _run(spec, model, ids)
    return ModuleRun(ids=tuple(ids), outputs=outputs)


def replay(
    spec: ModelSpec, captured: ModuleRun, scheme: str | None, device: torch.device = CPU
) -> dict[tuple[str, ...], Replayed]:
    """The module's linear layers as `scheme` holds them (None: as they are stored) on `device`, all
    else on the CPU as it ran. Errors by the names of their weights."""
    outputs: Layers = {}

    def see(names: tuple[str, ...], x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        if names in captured.outputs:
            outputs[names] = y_TO.clone()

    observed, others = ObservedLinears(see), ObservedLinears(lambda names, x_TI, y_TO: None)
    model = _loaded(spec, observed)
    _loaded(msgspec.structs.replace(spec, quantization=scheme), others, device)
    gemms = {names: _from_host(others.gemms[names], device) for names in captured.outputs}
    observed.gemms.update(gemms)
    _run(spec, model, captured.ids)
    return {names: _errors(outputs[names], y_TO) for names, y_TO in captured.outputs.items()}


def _from_host(gemm: Linear, device: torch.device) -> Linear:
    """The product of inputs on the CPU, where its results go back to."""
    return gemm if device == CPU else lambda x_TI: gemm(x_TI.to(device)).to(CPU)


def _belongs(name: str, module: str) -> bool:
    return name == f"{module}.weight" or name.startswith(f"{module}.")


def _run(spec: ModelSpec, model: LoadableModel, ids: Sequence[int]) -> None:
    run = WholeTexts(model, most=len(ids), block_tokens=BLOCK_TOKENS, dtype=DTYPES[spec.dtype])
    run.forward(ids)


def _errors(ours_TO: torch.Tensor, captured_TO: torch.Tensor) -> Replayed:
    error_TO = (ours_TO.float() - captured_TO.float()).abs()
    return Replayed(
        largest=float(error_TO.max()),
        mean=float(error_TO.mean()),
        relative=float(error_TO.norm() / captured_TO.float().norm()),
    )


def _loaded(
    spec: ModelSpec, observed: ObservedLinears, device: torch.device = CPU
) -> LoadableModel:
    model, _ = load_model(
        spec, mesh=Mesh(), device=device, block_tokens=BLOCK_TOKENS, adapters=observed
    )
    return model
