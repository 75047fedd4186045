"""The models of one server: read from a folder or a file, each resolved as `headrace serve` would
resolve it alone, but that all of them share one budget of memory.

Nothing is loaded here. What a model needs is taken from its files' headers; a model that can never
fit the budget is refused by its numbers. In a folder one bad model keeps the others from nothing:
it is listed with the reason; in a file, which somebody wrote for this server, it is an error.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config.many_options import ManyOptions, ModelEntry, keep_alive_s
from headrace.base.config.options import build, load_yaml, nested_values
from headrace.base.config.resolved import EngineSpec, ServerSpec, TextSpec
from headrace.base.config.tree import Options
from headrace.base.config.units import parse_bytes, show_bytes
from headrace.base.config.weight_files import folder_format, natural_key
from headrace.base.errors import ConfigError, StartError
from headrace.launch.facts import check_grpc, find_model, with_keys
from headrace.launch.model_facts import ModelFacts
from headrace.launch.resolve import CPU_KV_SHARE, MIN_KV_BYTES, resolve, server_spec
from headrace.launch.resolve_device import MachineFacts
from headrace.launch.topology import device_facts

BUDGET_SHARE = 0.8
SLEEP_SHARE = 0.5
CPU_PROCESS_BYTES = 256 << 20
"""A core process beside weights and KV cache: 202 MB measured, with torch 2.11 on x86."""
CUDA_PROCESS_BYTES = 1 << 30
"""The same of device memory: CUDA's context, workspaces and recorded steps."""
MAX_MODELS = 1024
PER_MODEL = ("model", "kv", "scheduler", "device", "adapters")
PER_MODEL_SERVER = ("tool_parser", "reasoning_parser")
_FIRST_SHARD = re.compile(r"-0*1-of-\d{5}$")
_LATER_SHARD = re.compile(r"-(?!0*1-)\d{5}-of-\d{5}\.gguf$")
_NAMED_ELSEWHERE = ("model", "served_model_name")


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `process_bytes`: what its core takes beside weights, cache and graphs;
    `num_bytes`: all of it, estimated. `keep_alive_s` is infinite for "for ever". `error`: why it
    cannot be served; then there is no `engine` and no `text`."""

    name: str
    path: str
    names: tuple[str, ...]
    pinned: bool
    priority: int
    keep_alive_s: float
    engine: EngineSpec | None = None
    text: TextSpec | None = None
    weight_bytes: int = 0
    process_bytes: int = 0
    num_bytes: int = 0
    error: str = ""

    def about(self, why: str) -> str:
        """A reason without the place of the model's files, which is no business of clients."""
        return why.replace(self.path, self.name)


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """All models of a server, and what they share. `sleep_bytes`: of host memory, for those that
    sleep."""

    models: tuple[CatalogModel, ...]
    server: ServerSpec
    budget_bytes: int
    sleep_bytes: int
    max_loaded: int | None
    wait_s: float

    @property
    def imports(self) -> str:
        """What a core imports that will load any of the models; "" nothing worth it."""
        engines = [model.engine for model in self.models if model.engine is not None]
        inline = any(engine.device.executor == "inline" for engine in engines)
        return "headrace.back.executor.inline" if inline else ""

    @property
    def default(self) -> CatalogModel:
        """The first model that can be served: the one of requests that name none."""
        return next(model for model in self.models if model.text is not None)


def read_catalog(options: Options) -> Catalog:
    """The models that the options name; StartError for whatever the user must mend."""
    many = options.many
    _check(options)
    machine = device_facts(options.device.device)
    options = msgspec.structs.replace(options, server=with_keys(options.server))
    check_grpc(options.server)
    entries = _folder_entries(many) if many.models is None else _file_entries(many.models)
    _check_names(entries)
    budget = int(machine.free_bytes * BUDGET_SHARE)
    if many.models_memory != "auto":
        budget = parse_bytes(many.models_memory, field="--models-memory")
    machine = msgspec.structs.replace(machine, free_bytes=min(machine.free_bytes, budget))
    models = []
    for entry in entries:
        try:
            models.append(_resolved(entry, options, machine, budget))
        except StartError as error:
            if many.models is not None:
                raise ConfigError(f"{many.models}: model {entry.name}: {error.message}") from error
            models.append(_broken(entry, many, error.message))
    if all(model.error for model in models):
        why = "; ".join(f"{model.name}: {model.error}" for model in models)
        raise ConfigError(
            f"--models-dir {many.models_dir}: none of the models can be served: {why}"
        )
    return Catalog(
        models=tuple(models),
        server=server_spec(options.server),
        budget_bytes=budget,
        sleep_bytes=_sleep_bytes(many, machine),
        max_loaded=many.models_max,
        wait_s=many.model_wait_s,
    )


def serves_many(options: Options) -> bool:
    """Whether the options name several models."""
    return options.many.models is not None or options.many.models_dir is not None


def _check(options: Options) -> None:
    many = options.many
    if many.models is not None and many.models_dir is not None:
        raise ConfigError("--models and --models-dir: give one of them", field="models")
    flag = "--models" if many.models is not None else "--models-dir"
    if options.model.model:
        raise ConfigError(
            f"{flag} beside the model {options.model.model!r}: name it in {flag} too", field="model"
        )
    if options.model.served_model_name:
        raise ConfigError(
            f"--served-model-name: with {flag} each model has its own name (and aliases)",
            field="served_model_name",
        )
    device = options.device
    for field, count in (
        ("replicas", device.replicas),
        ("data_parallel", device.data_parallel),
        ("max_replicas", device.max_replicas or 1),
    ):
        if count > 1:
            raise ConfigError(
                f"--{field.replace('_', '-')} {count}: with {flag} each model has one engine core; "
                "start a server for each replica behind a load balancer",
                field=field,
            )


def _file_entries(name: str) -> list[ModelEntry]:
    document = load_yaml(Path(name).expanduser(), flag="--models")
    rows = document.get("models") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_MODELS:
        raise ConfigError(
            f"--models {name}: a list of 1 to {MAX_MODELS} models is wanted, alone or under 'models'",
            field="models",
        )
    entries = []
    for number, row in enumerate(rows):
        try:
            entries.append(msgspec.convert(row, ModelEntry))
        except msgspec.ValidationError as error:
            raise ConfigError(f"--models {name}: model {number}: {error}", field="models") from None
    return entries


def _folder_entries(many: ManyOptions) -> list[ModelEntry]:
    folder = Path(many.models_dir or "").expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--models-dir {folder}: there is no such folder", field="models_dir")
    paths = [path for path in folder.iterdir() if _is_model(path)]
    if not 1 <= len(paths) <= MAX_MODELS:
        raise ConfigError(
            f"--models-dir {folder}: {len(paths)} models there (folders with a config.json or GGUF "
            f"files, GGUF files); 1 to {MAX_MODELS} are wanted",
            field="models_dir",
        )
    rows = [
        {
            "name": _FIRST_SHARD.sub("", path.stem) if path.is_file() else path.name,
            "path": str(path),
        }
        for path in sorted(paths, key=lambda path: natural_key(path.name))
    ]
    try:
        return msgspec.convert(rows, list[ModelEntry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"--models-dir {folder}: {error}", field="models_dir") from None


def _is_model(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.is_file():
        is_other = path.name.startswith("mmproj") or _LATER_SHARD.search(path.name) is not None
        return path.suffix == ".gguf" and not is_other
    return path.is_dir() and (folder_format(path) != "none" or any(path.glob("*.gguf")))


def _check_names(entries: list[ModelEntry]) -> None:
    names: set[str] = set()
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if name in names:
                raise ConfigError(f"two models have the name {name!r}", field="models")
            names.add(name)


def _resolved(
    entry: ModelEntry, options: Options, machine: MachineFacts, budget: int
) -> CatalogModel:
    options = _options_of(entry, options)
    facts = find_model(options)[1]
    if machine.kind == "cuda":
        options = _with_share(options, facts, budget)
    resolved = resolve(options, facts, machine)
    engine, device = resolved.engine, resolved.engine.device
    weight_bytes = facts.weight_bytes // device.world_size
    process_bytes = CUDA_PROCESS_BYTES if device.device == "cuda" else CPU_PROCESS_BYTES
    need = weight_bytes + _kv_bytes(engine, facts) + process_bytes
    if need > budget:
        raise ConfigError(
            f"it needs {show_bytes(need)} (weights {show_bytes(weight_bytes)}, KV cache "
            f"{show_bytes(_kv_bytes(engine, facts))}, its process {show_bytes(process_bytes)}), and "
            f"all models may have {show_bytes(budget)}: raise --models-memory, or lower --kv-memory "
            "or --max-model-len for it"
        )
    modules = engine.model.adapters.modules if engine.model.adapters is not None else ()
    bare = _broken(entry, options.many, "")
    return msgspec.structs.replace(
        bare,
        names=(*bare.names, *(name for name, _ in modules)),
        engine=engine,
        text=resolved.text,
        weight_bytes=weight_bytes,
        process_bytes=process_bytes,
        num_bytes=need,
    )


def _broken(entry: ModelEntry, many: ManyOptions, error: str) -> CatalogModel:
    kept = many.keep_alive if entry.keep_alive is None else entry.keep_alive
    seconds = keep_alive_s(kept, field="keep_alive")
    path = str(Path(entry.path).expanduser())
    return CatalogModel(
        name=entry.name,
        path=path,
        names=(entry.name, *entry.aliases),
        pinned=entry.pinned,
        priority=entry.priority,
        keep_alive_s=math.inf if seconds < 0 else seconds,
        error=error.replace(path, entry.name),
    )


def _options_of(entry: ModelEntry, options: Options) -> Options:
    """The server's options with those of this model in their place."""
    defaults = msgspec.to_builtins(Options())
    values: dict[str, dict[str, Any]] = {
        group: {name: value for name, value in members.items() if value != defaults[group][name]}
        for group, members in msgspec.to_builtins(options).items()
    }
    for group, members in nested_values(entry.options, source="options").items():
        for name, value in members.items():
            shared = group not in PER_MODEL and name not in PER_MODEL_SERVER
            if shared or name in _NAMED_ELSEWHERE:
                raise ConfigError(f"options: {name} is not an option of one model", field=name)
            values[group][name] = value
    values["model"] |= {"model": entry.path, "served_model_name": [entry.name, *entry.aliases]}
    return build(values)


def _with_share(options: Options, facts: ModelFacts, budget: int) -> Options:
    """A KV cache that leaves room for other models on the device, where none is asked for."""
    if options.kv.kv_blocks is not None or options.kv.kv_memory != "auto":
        return options
    split = options.device.tensor_parallel * options.device.pipeline_parallel
    weights = facts.weight_bytes // split
    share = max(MIN_KV_BYTES, int(budget * CPU_KV_SHARE) - weights // 4)
    kv = msgspec.structs.replace(options.kv, kv_memory=str(share))
    return msgspec.structs.replace(options, kv=kv)


def _kv_bytes(engine: EngineSpec, facts: ModelFacts) -> int:
    if engine.kv.memory_bytes is not None:
        return engine.kv.memory_bytes
    if engine.device.executor == "null" or engine.kv.num_blocks is None:
        return 0
    return engine.kv.num_blocks * engine.kv.block_tokens * facts.kv_bytes_per_token


def _sleep_bytes(many: ManyOptions, machine: MachineFacts) -> int:
    if many.models_sleep_memory != "auto":
        return parse_bytes(many.models_sleep_memory, field="--models-sleep-memory")
    if machine.kind != "cuda":
        return 0
    from headrace.back.platforms.detect import detect

    host = next(one for one in detect() if one.kind == "cpu")
    return int(host.free_bytes * SLEEP_SHARE)
