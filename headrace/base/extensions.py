"""Code of others that a server may use: found by Python's entry points, used only where the
operator allows it by name.

    [project.entry-points."headrace.logits_processors"]
    no_digits = "my_package.processors:no_digits"

A package that is installed is listed (`headrace env`), and nothing of it is imported until an
extension that `--extensions` names is wanted. The module of an extension says which version of
headrace's interface it was written for: `HEADRACE_API = 1`. What an extension raises is an error of
the request, or of the start, that wanted it, with its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from headrace.base.errors import ConfigError, InvalidRequest

API_VERSION = 1
OPTION = (
    "Installed extensions that may be used, by their names or their packages' (headrace env lists "
    "them; docs/EXTENDING.md). None: no code of others is imported."
)
MODELS = "headrace.models"
LOGITS_PROCESSORS = "headrace.logits_processors"
TOOL_PARSERS = "headrace.tool_parsers"
REASONING_PARSERS = "headrace.reasoning_parsers"
ADMISSION_HOOKS = "headrace.admission_hooks"
STATS = "headrace.stats"
SCHEDULERS = "headrace.schedulers"
DRAFTERS = "headrace.drafters"
PLATFORMS = "headrace.platforms"
IO_PROCESSORS = "headrace.io_processors"
QUANTIZATIONS = "headrace.quantizations"
POOLERS = "headrace.poolers"
EXECUTORS = "headrace.executors"
GROUPS: Mapping[str, str] = {
    MODELS: "an architecture of config.json -> build(scope, config), as in back/models",
    LOGITS_PROCESSORS: "a function (token_ids, logits) -> logits over one row",
    TOOL_PARSERS: "a ToolFamily (front/text/parsing/rows.py), for --tool-parser",
    REASONING_PARSERS: "a ReasoningFamily, for --reasoning-parser",
    ADMISSION_HOOKS: "make(spec, core) -> AdmissionHook (core/ports.py): when requests may run",
    STATS: "make(spec) -> StatsSink (core/ports.py): figures of steps and requests",
    SCHEDULERS: "a Scheduler (core/scheduler/scheduler.py), for --scheduler-cls",
    DRAFTERS: "make(spec, device) -> Drafter (back/speculative/drafter.py), a method of its name",
    PLATFORMS: "a Platform (back/platforms/foreign.py), for --device",
    IO_PROCESSORS: "make(text) -> IOProcessor (front/client/io_processor.py), for data of /pooling",
    QUANTIZATIONS: "a QuantizationFormat (base/config/foreign_quantization.py), a quant_method",
    POOLERS: "pool(hidden_TE) -> [E], a way of `pooling` by its name",
    EXECUTORS: "make(spec) -> Executor (core/ports.py), for --executor",
}
"""Group of entry points -> what each of its names stands for."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One entry point. `package`: the distribution that has it, with its version."""

    group: str
    name: str
    target: str
    package: str
    version: str


_allowed: dict[str, dict[str, Extension]] = {group: {} for group in GROUPS}


def installed() -> list[Extension]:
    """All extensions of installed packages, by group and name; none of them is imported."""
    extensions = []
    for group in GROUPS:
        for entry in metadata.entry_points(group=group):
            package = "" if entry.dist is None else entry.dist.name
            version = "" if entry.dist is None else entry.dist.version
            extensions.append(
                Extension(
                    group=group,
                    name=entry.name,
                    target=entry.value,
                    package=package,
                    version=version,
                )
            )
    return sorted(extensions, key=lambda one: (one.group, one.name, one.package))


def allow(names: Iterable[str]) -> None:
    """Lets this process use the extensions of these names, or of packages of these names, from now
    on, and no others. ConfigError if there is none of a name, or two of one name and group."""
    wanted = list(names)
    for chosen in _allowed.values():
        chosen.clear()
    if not wanted:
        return
    there = installed()
    for name in wanted:
        meant = [one for one in there if name in (one.name, one.package)]
        if not meant:
            known = ", ".join(sorted({one.name for one in there})) or "none"
            raise ConfigError(
                f"--extensions: {name!r} is not installed; installed are: {known}",
                field="extensions",
            )
        for one in meant:
            other = _allowed[one.group].setdefault(one.name, one)
            if other != one:
                raise ConfigError(
                    f"--extensions: {one.name!r} of {one.group} is in two packages: "
                    f"{other.package} and {one.package}",
                    field="extensions",
                )


def allowed(group: str) -> Mapping[str, Extension]:
    """By name, the extensions of a group that may be used."""
    return _allowed[group]


def load(group: str, name: str) -> object:
    """Imports what an allowed extension stands for; ConfigError with its name if it cannot be
    imported, or was written for another version of the interface."""
    one = _allowed[group][name]
    module_name, _, attribute = one.target.partition(":")
    try:
        module = importlib.import_module(module_name)
        target: object = module
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:
        raise ConfigError(
            f"extension {name} of {one.package} {one.version}: {one.target} cannot be imported "
            f"({type(error).__name__}: {error})",
            field="extensions",
        ) from error
    version = vars(module).get("HEADRACE_API")
    if version != API_VERSION:
        raise ConfigError(
            f"extension {name} of {one.package} {one.version} is written for version {version!r} of "
            f"the interface (HEADRACE_API in {module_name}); this is version {API_VERSION}",
            field="extensions",
        )
    return target


def check_named(group: str, name: str | None, option: str) -> None:
    """ConfigError for an extension that an option names and that may not be used; None: none is
    named."""
    known = _allowed[group]
    if name is not None and name not in known:
        raise ConfigError(
            f"--{option} {name}: --extensions allows {', '.join(sorted(known)) or 'none'}",
            field=option.replace("-", "_"),
        )


def check_processors(names: object) -> None:
    """InvalidRequest unless this is a list of logits processors that are allowed."""
    allowed = _allowed[LOGITS_PROCESSORS]
    if not isinstance(names, list | tuple):
        raise InvalidRequest(
            f"logits_processors: {names!r:.100} given; a list of names is wanted",
            field="logits_processors",
        )
    for name in names:
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise InvalidRequest(
                f"logits_processors: {name!r:.100} is not allowed by --extensions (allowed: "
                f"{known}); a request may not name code",
                field="logits_processors",
            )


def check(*groups: str) -> None:
    """Imports all of these groups that is allowed: what cannot be used ends the start, and names
    itself."""
    for group in groups:
        for name in _allowed[group]:
            load(group, name)
