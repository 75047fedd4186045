"""What PEFT calls the tensors of an adapter: the matrices of each module, those of parameters that
are no weights of modules, and magnitudes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.back.layers.adapter_shares import AdaptedModule
from headrace.base.config.safetensors_header import StoredTensor
from headrace.base.errors import CheckpointError

PREFIX = "base_model.model."
HALF = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_([AB])(?:\.default)?\.weight")
TABLE_HALF = re.compile(r"(.+)\.lora_embedding_([AB])(?:\.default)?")
MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_TABLE = re.compile(r"(.+)\.base_layer\.weight")


class Targets(Protocol):
    """Of a configuration: whether there are magnitudes, and which parameters are adapted."""

    @property
    def magnitudes(self) -> bool: ...

    @property
    def parameters(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class StoredPair:
    """Matrices of one module, where they lie. `kind`: see AdaptedModule."""

    a: StoredTensor
    b: StoredTensor
    kind: str = "linear"
    magnitude: StoredTensor | None = None


def pairs_of(
    path: Path,
    config: Targets,
    stored: Mapping[str, StoredTensor],
    modules: Mapping[str, AdaptedModule],
) -> dict[str, StoredPair]:
    """A and B by module, or by parameter."""
    halves: dict[tuple[str, str, str], dict[str, StoredTensor]] = {}
    magnitudes: dict[str, StoredTensor] = {}
    others = []
    for name, tensor in stored.items():
        inner = name.removeprefix(PREFIX)
        if inner == name:
            others.append(name)
        elif match := HALF.fullmatch(inner):
            halves.setdefault((match[1], match[2], "linear"), {})[match[3]] = tensor
        elif match := TABLE_HALF.fullmatch(inner):
            halves.setdefault((match[1], "", "table"), {})[match[2]] = tensor
        elif config.magnitudes and (match := MAGNITUDE.fullmatch(inner)):
            magnitudes[match[1]] = tensor
        elif not ((match := _TABLE.fullmatch(inner)) and _is_base(modules, match[1], tensor)):
            others.append(name)
    if others:
        raise CheckpointError(f"{path}: {listed(others)}: no matrices of a linear layer's adapter")
    if not halves:
        raise CheckpointError(f"{path} holds no adapter")
    pairs = {}
    at_depths = [(module, depth) for module, depth, _ in halves]
    for (module, depth, kind), pair in halves.items():
        parameter = parameter_of(module, depth, at_depths, config.parameters)
        lacking = {"A", "B"} - pair.keys()
        if lacking:
            leaf = f"{depth}.lora_" if kind == "linear" else ".lora_embedding_"
            end = ".weight" if kind == "linear" else ""
            missing = f"{PREFIX}{module}{leaf}{lacking.pop()}{end}"
            raise CheckpointError(f"{path}: tensor {missing} is missing")
        if depth and parameter is None:
            raise CheckpointError(f"{path}: {module}{depth}: no parameter of that name is adapted")
        pairs[parameter or module] = StoredPair(
            a=pair["A"],
            b=pair["B"],
            kind=kind if parameter is None else "parameter",
            magnitude=magnitudes.pop(module, None),
        )
    if magnitudes:
        raise CheckpointError(f"{path}: {listed(list(magnitudes))}: magnitudes without matrices")
    return pairs


def _is_base(modules: Mapping[str, AdaptedModule], name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is the base's own table, which PEFT saves beside adapters of it."""
    module = modules.get(name)
    return module is not None and tensor.shape in (
        (module.inputs, module.outputs),
        (module.outputs, module.inputs),
    )


def parameter_of(
    module: str, depth: str, at_depths: Collection[tuple[str, str]], parameters: Sequence[str]
) -> str | None:
    """The parameter that an adapter of a module is for, None: its weight. Those of one module lie
    one in another (`depth`: ".base_layer" for each; of all of them in `at_depths`), the module's
    first innermost, in whatever order they are named: transformers has downs last."""
    mine = sorted(
        (
            name
            for name in parameters
            if module == name.rpartition(".")[0] or module.endswith(f".{name.rpartition('.')[0]}")
        ),
        key=lambda name: name.endswith("down_proj"),
    )
    if not mine:
        return None
    level = depth.count(".base_layer")
    deepest = max(way.count(".base_layer") for owner, way in at_depths if owner == module)
    if deepest >= len(mine) or level > deepest:
        return None
    return f"{module}.{mine[deepest - level].rpartition('.')[2]}"


def listed(names: list[str], shown: int = 4) -> str:
    """The first of them, and how many there are more."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(sorted(names)[:shown]) + more
