"""All that PEFT stores of an adapter, as changes of the base's tensors, for merging it: beside the
matrices of linear layers those of experts that are one parameter, of tables of tokens, magnitudes
(DoRA, Liu et al. 2024, equation 5), single rows of a table, and whole tensors.

PEFT 0.21, `peft/tuners/lora/layer.py`: `ParamWrapper`, `Embedding`, `peft/tuners/lora/dora.py`. R
ranks, I inputs, O outputs, V tokens, N experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.back.layers.adapter_shares import LowRank
from headrace.back.lora.names import HALF, MAGNITUDE, PREFIX, TABLE_HALF, listed, parameter_of
from headrace.back.lora.peft import LoraConfig, read_config, stored_tensors, tensor_of
from headrace.base.config.hf import read_json
from headrace.base.config.safetensors_header import StoredTensor
from headrace.base.errors import CheckpointError

MERGED = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "ensure_weight_tying",
)
"""Keys of the configuration that adapters may have which are merged, not served."""
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class WholeAdapter:
    """An adapter by names of the base. `linears`: by module, a low-rank change of its weight [O, I]
    and the magnitude of each output, None: none is stated. `tables`: of weights [V, I], a [R, V], b
    [I, R]. `experts`: by parameter [N, O, I], a [N * R, I], b [O, R * N]. `rows`: rows of a table,
    and what they are. `whole`: tensors by their names."""

    linears: dict[str, tuple[LowRank, torch.Tensor | None]] = field(default_factory=dict)
    tables: dict[str, LowRank] = field(default_factory=dict)
    experts: dict[str, LowRank] = field(default_factory=dict)
    rows: dict[str, tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The greatest of a matrix."""
        pairs = [pair for pair, _ in self.linears.values()]
        return max((len(pair.a_RI) for pair in (*pairs, *self.tables.values())), default=0)


def read_whole(folder: Path) -> WholeAdapter:
    """The adapter in `folder`; CheckpointError for what is not known."""
    config = read_config(folder, beside=MERGED)
    raw = read_json(folder / "adapter_config.json")
    stored = stored_tensors(folder)
    adapter = WholeAdapter()
    halves: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    tables: dict[str, dict[str, StoredTensor]] = {}
    magnitudes: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{folder}: {name} is no tensor of an adapter")
        inner = name.removeprefix(PREFIX)
        if match := HALF.fullmatch(inner):
            halves.setdefault((match[1], match[2]), {})[match[3]] = tensor
        elif match := TABLE_HALF.fullmatch(inner):
            tables.setdefault(match[1], {})[match[2]] = tensor
        elif match := MAGNITUDE.fullmatch(inner):
            magnitudes[match[1]] = tensor
        elif match := _ROWS.fullmatch(inner):
            adapter.rows[match[1]] = (_indices(raw, match[1]), tensor_of(tensor))
        else:
            adapter.whole[inner.replace(".base_layer.", ".")] = tensor_of(tensor)
    at_depths = list(halves)
    for (module, depth), pair in halves.items():
        low_rank = _pair(folder, module, pair)
        parameter = parameter_of(module, depth, at_depths, config.parameters)
        if parameter is not None:
            rank = config.rank_of(module)
            adapter.experts[parameter] = _scaled(config, module, low_rank, rank)
        elif depth:
            raise CheckpointError(
                f"{folder}: {module}{depth}: no parameter of that name is adapted"
            )
        else:
            magnitude = magnitudes.pop(module, None)
            if raw.get("use_dora") and magnitude is None:
                raise CheckpointError(
                    f"{folder}: {module}: use_dora is set, its magnitudes are missing"
                )
            adapter.linears[module] = (
                _scaled(config, module, low_rank, len(low_rank.a_RI)),
                None if magnitude is None else tensor_of(magnitude),
            )
    for module, pair in tables.items():
        low_rank = _pair(folder, module, pair)
        adapter.tables[module] = _scaled(config, module, low_rank, len(low_rank.a_RI))
    if magnitudes:
        raise CheckpointError(f"{folder}: {listed(list(magnitudes))}: magnitudes without matrices")
    return adapter


def changes_of(
    adapter: WholeAdapter, *, transposed: frozenset[str] = frozenset(), experts: int = 0
) -> dict[str, list[Change]]:
    """By the base's name of a tensor, what becomes of it, in order. `transposed`: modules whose
    weight is [I, O]. Experts of parameters that a checkpoint holds one by one have names of their
    own."""
    changes: dict[str, list[Change]] = {}

    def add(name: str, change: Change) -> None:
        changes.setdefault(name, []).append(change)

    for name, tensor in adapter.whole.items():
        add(name, _replaced(tensor))
    for module, (indices, rows) in adapter.rows.items():
        add(f"{module}.weight", _with_rows(indices, rows))
    for module, pair in adapter.tables.items():
        add(f"{module}.weight", _added(delta_of(pair).t(), module))
    for module, (pair, magnitude) in adapter.linears.items():
        delta = delta_of(pair)
        is_turned = module in transposed
        if magnitude is None:
            add(f"{module}.weight", _added(delta.t() if is_turned else delta, module))
        else:
            add(f"{module}.weight", _with_magnitude(delta, magnitude, module, is_turned))
    for parameter, pair in adapter.experts.items():
        delta_NOI = expert_deltas(pair, experts)
        add(parameter, _added(delta_NOI, parameter))
        for name, part in _one_by_one(parameter, delta_NOI):
            add(name, _added(part, name))
    return changes


def delta_of(pair: LowRank) -> torch.Tensor:
    """s B A, float32 [O, I]."""
    return (pair.b_OR.float() @ pair.a_RI.float()) * pair.scale


def expert_deltas(pair: LowRank, experts: int) -> torch.Tensor:
    """The same of each expert, float32 [N, O, I]."""
    if experts < 1 or len(pair.a_RI) % experts or pair.b_OR.shape[1] % experts:
        raise CheckpointError(
            f"an adapter of {len(pair.a_RI)} ranks over all experts, of which the base has {experts}"
        )
    a_NRI = pair.a_RI.float().unflatten(0, (experts, -1))
    b_ORN = pair.b_OR.float().unflatten(1, (-1, experts))
    return torch.einsum("orn,nri->noi", b_ORN, a_NRI) * pair.scale


def _one_by_one(parameter: str, delta_NOI: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """By the names of experts that a checkpoint holds one by one: gates lie above ups."""
    module, _, name = parameter.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name, ())
    return [
        (f"{module}.{i}.{part}.weight", piece)
        for i, delta_OI in enumerate(delta_NOI)
        for part, piece in zip(parts, delta_OI.chunk(len(parts) or 1), strict=False)
    ]


def _replaced(tensor: torch.Tensor) -> Change:
    return lambda weight: tensor.to(weight.dtype)


def _with_rows(indices: tuple[int, ...], rows: torch.Tensor) -> Change:
    def change(weight: torch.Tensor) -> torch.Tensor:
        if rows.shape != (len(indices), weight.shape[1]) or max(indices, default=0) >= len(weight):
            raise CheckpointError(
                f"rows {indices[:4]} of shape {list(rows.shape)} do not fit a table of "
                f"{list(weight.shape)}"
            )
        return weight.index_copy(0, torch.tensor(indices), rows.to(weight.dtype))

    return change


def _added(delta: torch.Tensor, name: str) -> Change:
    def change(weight: torch.Tensor) -> torch.Tensor:
        _check(name, delta, weight)
        return (weight.float() + delta).to(weight.dtype)

    return change


def _with_magnitude(
    delta: torch.Tensor, magnitude: torch.Tensor, name: str, is_turned: bool
) -> Change:
    def change(weight: torch.Tensor) -> torch.Tensor:
        whole_OI = (weight.t() if is_turned else weight).float()
        _check(name, delta, whole_OI)
        whole_OI = whole_OI + delta
        factor_O = magnitude.float() / whole_OI.norm(dim=1)
        whole_OI = whole_OI * factor_O[:, None]
        return (whole_OI.t() if is_turned else whole_OI).to(weight.dtype).contiguous()

    return change


def _check(name: str, delta: torch.Tensor, weight: torch.Tensor) -> None:
    if delta.shape != weight.shape:
        raise CheckpointError(
            f"{name}: the adapter is for a weight of {list(delta.shape)}, this base has "
            f"{list(weight.shape)}"
        )


def _pair(folder: Path, module: str, pair: Mapping[str, StoredTensor]) -> LowRank:
    lacking = {"A", "B"} - pair.keys()
    if lacking:
        raise CheckpointError(f"{folder}: {module} has no matrix {lacking.pop()}")
    a_RI, b_OR = tensor_of(pair["A"]), tensor_of(pair["B"])
    if a_RI.dim() != 2 or b_OR.dim() != 2 or b_OR.shape[1] != a_RI.shape[0]:
        raise CheckpointError(
            f"{folder}: {module}: matrices {list(a_RI.shape)} and {list(b_OR.shape)} have no common "
            "rank"
        )
    return LowRank(a_RI=a_RI, b_OR=b_OR, scale=1.0)


def _scaled(config: LoraConfig, module: str, pair: LowRank, rank: int) -> LowRank:
    return LowRank(a_RI=pair.a_RI, b_OR=pair.b_OR, scale=config.scale_of(module, rank))


def _indices(raw: Mapping[str, object], module: str) -> tuple[int, ...]:
    stated = raw.get("trainable_token_indices")
    if isinstance(stated, dict):
        stated = next((at for name, at in stated.items() if module.endswith(name)), None)
    if not isinstance(stated, list) or not all(type(i) is int and i >= 0 for i in stated):
        raise CheckpointError(
            f"trainable_token_indices is {stated!r:.60}, a list of token ids is wanted",
            field="trainable_token_indices",
        )
    return tuple(stated)
