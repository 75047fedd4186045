"""Adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Read key by key, as data only: what a key asks for is done, or refused by name. Safetensors alone:
adapters come from strangers. A rank is what the tensors say; `alpha_pattern` and `rank_pattern` are
compared as names, never run as the regular expressions they may be (their time would be a
stranger's to choose). Which kinds of adapters are taken beside those of linear layers is the
caller's to say (layers/adapters.py: KINDS).

PEFT 0.21, `peft/tuners/lora/config.py` and `peft/utils/save_and_load.py`. R ranks, I inputs, O
outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from headrace.back.layers.adapter_shares import EXPERTS, MAGNITUDES, TABLES, AdaptedModule, LowRank
from headrace.back.lora.names import PREFIX, StoredPair, listed, pairs_of
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.safetensors_header import StoredTensor, read_safetensors_header
from headrace.base.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BESIDE: Final = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("lora_dropout", "layers_pattern", "megatron_core", "peft_version", "fan_in_fan_out"),
    *("eva_config", "loftq_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    "runtime_config",
)
"""Keys of training and of bookkeeping, which change nothing of what the tensors mean."""
_READ: Final = (
    *("init_lora_weights", "rank_pattern", "alpha_pattern"),
    *("target_modules", "layers_to_transform", "exclude_modules"),
)
"""Keys that are read without a `ConfigReader` asking for them."""
SERVED: Final = {MAGNITUDES: "use_dora", EXPERTS: "target_parameters"}
"""Keys that ask for what is served where there is room for it."""
_PLAIN_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal")
"""Beginnings of training that leave the base weights as they are."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What adapter_config.json says. `targets`: ends of names of which every layer has an adapter;
    None: the tensors alone say which. `magnitudes`: there are some (DoRA). `parameters`: those that
    are no weights of modules."""

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: tuple[tuple[str, int], ...]
    alphas: tuple[tuple[str, float], ...]
    targets: tuple[str, ...] | None
    magnitudes: bool = False
    parameters: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _by_name(self.ranks, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """What B(A x) is multiplied with (by the root of the rank: Kalajdzievski 2023, rsLoRA)."""
        alpha = _by_name(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter as stored: its matrices by module of the base model, and its greatest rank."""

    pairs: dict[str, LowRank]
    rank: int
    num_bytes: int


def read_adapter(
    folder: Path,
    modules: Mapping[str, AdaptedModule],
    *,
    max_rank: int,
    kinds: Collection[str] = (),
) -> PeftAdapter:
    """The adapter in `folder` for a model with these `modules`, and room for these `kinds`;
    CheckpointError with the names and numbers of everything that does not fit."""
    config = read_config(folder, beside=[SERVED[kind] for kind in kinds if kind in SERVED])
    path, stored = folder / WEIGHTS, stored_tensors(folder)
    halves = pairs_of(path, config, stored, modules)
    _check_modules(path, config, halves, modules, max_rank, kinds)
    pairs = {
        module: LowRank(
            a_RI=tensor_of(pair.a),
            b_OR=tensor_of(pair.b),
            scale=config.scale_of(module, _rank(pair, modules[module])),
            magnitude_O=None if pair.magnitude is None else tensor_of(pair.magnitude).flatten(),
        )
        for module, pair in halves.items()
    }
    num_bytes = sum(one.num_bytes for one in stored.values())
    ranks = [_rank(pair, modules[module]) for module, pair in halves.items()]
    return PeftAdapter(pairs=pairs, rank=max(ranks), num_bytes=num_bytes)


def _rank(pair: StoredPair, module: AdaptedModule) -> int:
    return pair.a.shape[0] // module.experts


def kinds_of(folder: Path) -> set[str]:
    """What an adapter holds beside matrices of linear layers, by its names."""
    raw = read_json(folder / CONFIG)
    kinds = {kind for kind, key in SERVED.items() if raw.get(key)}
    for name in stored_tensors(folder):
        if ".lora_embedding_" in name or name.startswith(f"{PREFIX}lm_head."):
            kinds.add(TABLES)
        if re.search(r"experts?\.(\d+|\w+_proj)\.", name):
            kinds.add(EXPERTS)
    return kinds


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The adapter's tensors, by name, where they lie in its file."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        also = "; adapter_model.bin is a pickle and never read" if pickled.exists() else ""
        raise CheckpointError(f"{folder} has no {WEIGHTS}{also}")
    return dict(read_safetensors_header(path))


def read_config(folder: Path, *, beside: Collection[str] = ()) -> LoraConfig:
    """adapter_config.json; a key that asks for what is not done here is refused by name, but for
    those that the caller reads `beside`."""
    path = folder / CONFIG
    reader = ConfigReader(read_json(path), str(path))
    reader.choice("peft_type", ("LORA",))
    _refuse_variants(reader, beside)
    config = LoraConfig(
        rank=reader.int("r", 8, ge=1),
        alpha=reader.float("lora_alpha", 8.0),
        rank_stabilized=reader.bool("use_rslora", False),
        ranks=_pattern(reader, "rank_pattern", int),
        alphas=_pattern(reader, "alpha_pattern", float),
        targets=_targets(reader),
        magnitudes=bool(reader.raw.get("use_dora")),
        parameters=tuple(str(one) for one in reader.raw.get("target_parameters") or ()),
    )
    known = {*_BESIDE, *_OFF, *_READ}
    unknown = [key for key in reader.unused() if key not in known and reader.raw.get(key)]
    if unknown:
        raise CheckpointError(
            f"{path}: {', '.join(unknown)}: what this asks for is not known here", field=unknown[0]
        )
    return config


INSTEAD = "; `headrace merge-adapter` merges them into the base"
_OFF: Final[Mapping[str, tuple[object, str]]] = {
    "bias": ("none", "biases of the base are not adapted"),
    "use_dora": (False, f"adapters with magnitudes (DoRA) need --lora-kinds magnitudes{INSTEAD}"),
    "ensure_weight_tying": (False, f"matrices that table and head share are not applied{INSTEAD}"),
    "lora_bias": (False, "adapters with biases are not applied"),
    "use_qalora": (False, "QALoRA is not applied"),
    "modules_to_save": (None, f"whole modules beside the adapter are not replaced{INSTEAD}"),
    "trainable_token_indices": (None, f"embeddings of tokens are not replaced{INSTEAD}"),
    "target_parameters": (
        None,
        f"adapters of experts that are one parameter need --lora-kinds experts{INSTEAD}",
    ),
    "layer_replication": (None, "layers are not replicated"),
    "alora_invocation_tokens": (None, "adapters that begin within a prompt are not applied"),
    "arrow_config": (None, "adapters are not routed between"),
    "use_bdlora": (None, "block-diagonal adapters are not applied"),
    "megatron_config": (None, "Megatron's layers are not those of the checkpoint"),
}
"""Keys that must be off, and why."""


def _refuse_variants(reader: ConfigReader, beside: Collection[str]) -> None:
    for key, (off, why) in _OFF.items():
        value = reader.raw.get(key)
        if value and value != off and key not in beside:
            raise CheckpointError(f"{reader.where}: {key} is {value!r}: {why}", field=key)
    start = reader.raw.get("init_lora_weights", True)
    if start is not None and start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{reader.where}: init_lora_weights is {start!r}, which changes the base's weights; "
            "save the adapter with path_initial_model_for_weight_conversion",
            field="init_lora_weights",
        )


def _targets(reader: ConfigReader) -> tuple[str, ...] | None:
    """Where every layer of a name must be there: a plain list, and no layers or modules left
    out."""
    raw = reader.raw
    names = raw.get("target_modules")
    chosen = raw.get("layers_to_transform") is not None or raw.get("exclude_modules")
    if not isinstance(names, list) or chosen:
        return None
    return reader.list("target_modules", of=str)


def _pattern(reader: ConfigReader, key: str, kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """(name, number) in order. A name with signs of a regular expression is refused."""
    section = reader.raw.get(key) or {}
    where = f"{reader.where}: {key}"
    if not isinstance(section, dict):
        raise CheckpointError(f"{where} is {section!r}, an object is wanted", field=key)
    numbers, pairs = ConfigReader(section, where), []
    for name in section:
        plain = name.replace("\\.", ".").removeprefix("^")
        if re.search(r"[\\*+?|()\[\]{}$^]", plain):
            raise CheckpointError(
                f"{where}: {name!r} is a regular expression; only names of modules are read",
                field=key,
            )
        number = numbers.int(name, ge=1) if kind is int else numbers.float(name)
        pairs.append((plain, number))
    return tuple(pairs)


def _by_name(pairs: tuple[tuple[str, Any], ...], module: str, default: Any) -> Any:
    """The number of the first name that is the module's or its end."""
    for name, number in pairs:
        if module == name or module.endswith(f".{name}"):
            return number
    return default


def _check_modules(
    path: Path,
    config: LoraConfig,
    pairs: Mapping[str, StoredPair],
    modules: Mapping[str, AdaptedModule],
    max_rank: int,
    kinds: Collection[str],
) -> None:
    unknown = [
        name
        for name, pair in pairs.items()
        if name not in modules or modules[name].kind != pair.kind
    ]
    if unknown:
        missing = [kind for kind in (TABLES, EXPERTS) if kind not in kinds]
        hint = f"; of {' and '.join(missing)}: --lora-kinds" if missing else ""
        raise CheckpointError(
            f"{path}: {listed(unknown)}: this model has no linear layer of that name that takes an "
            f"adapter (it may be made for another base{hint})"
        )
    for name, pair in pairs.items():
        _check_pair(path, name, pair, modules[name], config.rank_of(name), max_rank)
        mine = pair.kind == "linear" and modules[name].parts
        if config.magnitudes and pair.magnitude is None and mine:
            raise CheckpointError(f"{path}: {name}: use_dora is set, its magnitudes are missing")
    if config.targets is not None:
        wanted = [
            name
            for name in modules
            if any(name == end or name.endswith(f".{end}") for end in config.targets)
        ]
        missing = [name for name in wanted if name not in pairs and not _inside(name, pairs)]
        if missing:
            raise CheckpointError(
                f"{path}: {listed(missing)}: target_modules names them, and their tensors are missing"
            )


def _inside(name: str, pairs: Mapping[str, StoredPair]) -> bool:
    """Whether a module is one of many that an adapter of one parameter may be for, or that the base
    holds as a parameter: `target_modules` names no such thing."""
    return re.search(r"\.experts\.\d+\.", name) is not None


def _check_pair(
    path: Path,
    name: str,
    pair: StoredPair,
    module: AdaptedModule,
    rank: int,
    max_rank: int,
) -> None:
    if rank > max_rank:
        raise CheckpointError(
            f"{path}: {name} has rank {rank}, at most {max_rank} are served (--max-lora-rank)",
            field="max_lora_rank",
        )
    if pair.magnitude is not None and not (pair.kind == "linear" and module.parts):
        raise CheckpointError(
            f"{path}: {name} has magnitudes (DoRA), which are served of linear layers alone{INSTEAD}",
            field="use_dora",
        )
    ranks = rank * module.experts
    wanted = [(pair.a, (ranks, module.inputs)), (pair.b, (module.outputs, ranks))]
    if pair.magnitude is not None:
        wanted.append((pair.magnitude, (module.outputs,)))
    for tensor, shape in wanted:
        if tensor.shape != shape:
            raise CheckpointError(
                f"{path}: {tensor.name} has the shape {list(tensor.shape)}, of this base and rank "
                f"{rank} it is {list(shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: {tensor.name} has the dtype {tensor.dtype}, not {', '.join(_DTYPES)}"
            )


def tensor_of(stored: StoredTensor) -> torch.Tensor:
    """The tensor, which holds no NaN or Inf."""
    if stored.dtype not in _DTYPES:
        raise CheckpointError(
            f"{stored.path}: {stored.name} has the dtype {stored.dtype}, not {', '.join(_DTYPES)}"
        )
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        data = bytearray(file.read(stored.num_bytes))
    if len(data) != stored.num_bytes:
        raise CheckpointError(f"{stored.path}: the file became shorter while it was read")
    values = torch.frombuffer(data, dtype=_DTYPES[stored.dtype]).view(stored.shape)
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{stored.path}: tensor {stored.name} holds NaN or Inf")
    return values
