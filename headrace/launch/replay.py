"""Replays one linear layer of a run: what went into it and came out of it is captured while a text
goes through the model, and goes through the same layer again as other schemes hold it.

Only that layer differs, so the errors are its own and not those of what stands before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from headrace.back.layers.observed import ObservedLinears
from headrace.back.models.load import load_model
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.registry import DTYPES
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.whole_text import WholeTexts
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import ConfigError

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRun:
    """A layer's inputs x_TI and outputs y_TO of one text. `names`: the weights whose outputs lie
    side by side."""

    names: tuple[str, ...]
    x_TI: torch.Tensor
    y_TO: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Errors of the outputs: the largest and the mean magnitude, and the Euclidean norm relative to
    the captured outputs'."""

    largest: float
    mean: float
    relative: float


def capture(spec: ModelSpec, module: str, ids: Sequence[int]) -> LayerRun:
    """The layer whose weights `module` names ("model.layers.0.mlp.down_proj"), over a text.
    ConfigError if the model has none, with the names that it has."""
    seen: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def see(names: tuple[str, ...], x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        if f"{module}.weight" in names:
            seen[names] = x_TI.clone(), y_TO.clone()

    observed = ObservedLinears(see)
    model = _loaded(spec, observed)
    known = [name.removesuffix(".weight") for names in observed.gemms for name in names]
    if module not in known:
        last = module.rsplit(".", 1)[-1]
        near = [name for name in known if name.endswith(last)] or known
        raise ConfigError(
            f"--module {module}: not among the {len(known)} linear layers, such as {', '.join(near[:4])}",
            field="--module",
        )
    run = WholeTexts(model, most=len(ids), block_tokens=BLOCK_TOKENS, dtype=DTYPES[spec.dtype])
    run.forward(ids)
    ((names, (x_TI, y_TO)),) = seen.items()
    return LayerRun(names=names, x_TI=x_TI, y_TO=y_TO)


def replay(spec: ModelSpec, captured: LayerRun, scheme: str | None) -> Replayed:
    """The captured inputs through the layer as `scheme` holds it; None: as it was."""
    observed = ObservedLinears(lambda names, x_TI, y_TO: None)
    _loaded(msgspec.structs.replace(spec, quantization=scheme), observed)
    with torch.inference_mode():
        y_TO = observed.gemms[captured.names](captured.x_TI.clone())
    error_TO = (y_TO.float() - captured.y_TO.float()).abs()
    return Replayed(
        largest=float(error_TO.max()),
        mean=float(error_TO.mean()),
        relative=float(error_TO.norm() / captured.y_TO.float().norm()),
    )


def _loaded(spec: ModelSpec, observed: ObservedLinears) -> LoadableModel:
    model, _ = load_model(
        spec,
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
        adapters=observed,
    )
    return model
