"""The options of low-rank adapters, decided; and the adapters that an engine core loads when it
starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

from headrace.back.models.families import FALLBACK
from headrace.base.config.adapter_options import KINDS
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.resolved import AdapterSpec, DeviceSpec, EngineSpec
from headrace.base.config.tree import Options
from headrace.base.errors import CheckpointError, ConfigError, HeadraceError, InvalidRequest
from headrace.core.adapter_folders import check_name
from headrace.core.adapters import Adapters
from headrace.core.ports import AdapterWorkers, Executor
from headrace.launch.model_facts import ModelFacts
from headrace.launch.weights_source import WeightsSource

log = logging.getLogger(__name__)


MEDIA = ("image", "video", "audio")
OF_SOUND = "of-sound"
"""The name of the adapter that a checkpoint has for requests with sound (Granite Speech)."""
KEPT = 32
"""Adapters in host memory, where nothing is said."""


def adapter_spec(
    options: Options, model: ModelFacts, device_spec: DeviceSpec
) -> AdapterSpec | None:
    """Whether and which adapters are taken; ConfigError where the model or the executor takes
    none."""
    asked, own = options.adapters, _own(model)
    folders = (*asked.lora_folders, *asked.lora_resolver_folders)
    wanted = bool(asked.enable_lora or asked.lora_modules or folders or asked.default_mm_loras)
    if not (wanted or (own and device_spec.executor != "null")):
        return None
    reason = None
    if model.head != "lm":
        reason = f"{model.architecture} generates no text"
    elif model.family == FALLBACK:
        reason = f"{model.architecture} runs by the transformers fallback, which applies none"
    elif model.has_encoder:
        reason = f"{model.architecture} is an encoder-decoder, to which none are applied"
    elif device_spec.executor == "null":
        reason = "--executor null computes nothing"
    if reason is not None:
        raise ConfigError(f"--enable-lora: {reason}", field="enable_lora")
    kept = KEPT if asked.max_cpu_loras == "auto" else asked.max_cpu_loras
    modules = _modules(options)
    if own and any(name == OF_SOUND for name, _ in modules):
        raise ConfigError(
            f"--lora-modules: {OF_SOUND} is the adapter of the checkpoint", field="lora_modules"
        )
    slots, rank = asked.max_loras, asked.max_lora_rank
    if not wanted:
        slots, rank = 1, own
    return AdapterSpec(
        slots=slots,
        max_rank=max(rank, own),
        kept=max(kept, slots),
        kinds=_kinds(asked.lora_kinds, modules),
        roots=tuple(_folder(root, "lora_folders") for root in asked.lora_folders),
        modules=((OF_SOUND, model.path), *modules) if own else modules,
        resolvers=tuple(
            _folder(root, "lora_resolver_folders") for root in asked.lora_resolver_folders
        ),
        of_kinds=_of_kinds(asked.default_mm_loras, modules, own=bool(own)),
    )


def _kinds(
    asked: tuple[str, ...] | Literal["auto"], modules: tuple[tuple[str, str], ...]
) -> tuple[str, ...]:
    """What slots have room for beside matrices of linear layers, in the order of KINDS. Adapters
    that cannot be read are refused when they are."""
    if asked != "auto":
        return tuple(kind for kind in KINDS if kind in asked)
    if not modules:
        return ()
    from headrace.back.lora.peft import kinds_of  # with torch, which a start without needs not

    held: set[str] = set()
    for _, folder in modules:
        with suppress(CheckpointError):
            held |= kinds_of(Path(folder))
    return tuple(kind for kind in KINDS if kind in held)


def _own(model: ModelFacts) -> int:
    """The rank of the adapter that lies beside the checkpoint's weights, to run where the model
    hears; 0: there is none."""
    path = Path(model.path) / "adapter_config.json"
    if not model.config.get("has_lora_adapter") or not path.is_file():
        return 0
    return ConfigReader(read_json(path), str(path)).int("r", 8, ge=1, le=1024)


def _modules(options: Options) -> tuple[tuple[str, str], ...]:
    modules: dict[str, str] = {}
    for module in options.adapters.lora_modules:
        name, sign, folder = module.partition("=")
        field = "lora_modules"
        if not sign:
            raise ConfigError(f"--lora-modules: {module!r} is not NAME=FOLDER", field=field)
        try:
            check_name(name)
        except InvalidRequest as error:
            raise ConfigError(f"--lora-modules: {error.message}", field=field) from None
        if name in modules or name in options.model.served_model_name:
            raise ConfigError(f"--lora-modules: {name} is a name already", field=field)
        modules[name] = _folder(folder, field)
    return tuple(modules.items())


def _of_kinds(
    asked: tuple[str, ...], modules: tuple[tuple[str, str], ...], *, own: bool
) -> tuple[tuple[str, str], ...]:
    """(kind of media, adapter), the first that applies first."""
    of_kinds = {"audio": OF_SOUND} if own else {}
    known = {name for name, _ in modules}
    for one in asked:
        kind, _, name = one.partition("=")
        if kind not in MEDIA or name not in known:
            raise ConfigError(
                f"--default-mm-loras: {one!r}; KIND=NAME is wanted, KIND one of {', '.join(MEDIA)}, NAME one of "
                f"--lora-modules ({', '.join(sorted(known)) or 'there are none'})",
                field="default_mm_loras",
            )
        if kind in of_kinds:
            raise ConfigError(
                f"--default-mm-loras: {kind} has the adapter {of_kinds[kind]} already",
                field="default_mm_loras",
            )
        of_kinds[kind] = name
    return tuple(of_kinds.items())


def _folder(text: str, field: str) -> str:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        flag = field.replace("_", "-")
        raise ConfigError(f"--{flag}: {text!r} is no folder", field=field)
    return str(folder.absolute())


def adapters_of(spec: EngineSpec, executor: Callable[[], Executor]) -> Adapters | None:
    """The adapters of an engine, if it takes any; `executor`: the one that is installed."""
    if spec.model.adapters is None:
        return None
    return Adapters(
        spec.model.adapters, lambda order: cast(AdapterWorkers, executor()).adapt(order)
    )


def load_adapters(
    spec: EngineSpec, adapters: Adapters, source: WeightsSource, *, asleep: bool
) -> None:
    """Those that the operator named, which end the start if they do not fit, and those that were
    loaded while a core before this one ran; a core that begins asleep reads them later."""
    assert spec.model.adapters is not None
    resolvers = spec.model.adapters.resolvers
    for name, folder in spec.model.adapters.modules:
        try:
            if asleep:
                adapters.know(name, folder)
                continue
            adapters.load_now(name, folder, trusted=True)
        except HeadraceError as error:
            raise ConfigError(
                f"--lora-modules {name}={folder}: {error.message}", field="lora_modules"
            ) from None
    for name, folder in spec.model.adapters.loaded:
        try:
            if asleep or os.path.dirname(folder) in map(os.path.realpath, resolvers):
                adapters.know(name, folder)
                continue
            adapters.load_now(name, folder, trusted=False)
        except HeadraceError as error:
            log.error("adapter %s of %s is not loaded again: %s", name, folder, error.message)
    adapters.keep = source.keep_adapters
    adapters.advance()
