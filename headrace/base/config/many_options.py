"""The options of a server with several models, a group of the tree (tree.py), and what a file of
models says of each."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.base.config.bounds import BytesOrAuto, Positive, Seconds
from headrace.base.config.units import parse_duration

Priority = Annotated[int, Meta(ge=-1000, le=1000)]
ModelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$")]


class ManyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Several models in one server: each has an engine core of its own, started when it is first
    wanted. The other options hold for all of them, unless the file says otherwise."""

    models: Annotated[
        str | None,
        Meta(
            description="A YAML file that lists the models to be served: name, path, and for each pinned, priority, "
            "keep_alive, aliases and options."
        ),
    ] = None
    models_dir: Annotated[
        str | None,
        Meta(
            description="Serve every model in this folder, by the name of its folder or GGUF file."
        ),
    ] = None
    models_memory: Annotated[
        BytesOrAuto,
        Meta(
            description="Memory of all models that are loaded, weights and KV caches together (on a GPU: of one "
            "device); auto: 80 % of what is free."
        ),
    ] = "auto"
    models_max: Annotated[
        Positive | None,
        Meta(description="Most models loaded at a time; none: what the memory holds."),
    ] = None
    models_sleep_memory: Annotated[
        BytesOrAuto,
        Meta(
            description="Host memory for the weights of models that sleep, from where they wake instead of being "
            "loaded; auto: on a GPU half of what is free, on a CPU 0."
        ),
    ] = "auto"
    keep_alive: Annotated[
        str,
        Meta(
            description="How long a model stays loaded without requests: 5m, 1h30m or seconds; -1: until its memory "
            "is wanted. A request may say it with keep_alive."
        ),
    ] = "5m"
    model_wait_s: Annotated[
        Seconds,
        Meta(
            description="Longest a request waits for its model; then it is refused (503) with the reason."
        ),
    ] = 300.0


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the file. `path`: a folder, a GGUF file or a hub id that is in the cache. A pinned
    model is loaded at start and stays. Of those that are not used the one of lowest `priority` goes
    first. `options`: as on the command line, for this model alone."""

    name: ModelName
    path: str
    pinned: bool = False
    priority: Priority = 0
    keep_alive: str | float | None = None
    aliases: tuple[ModelName, ...] = ()
    options: dict[str, Any] = {}


def keep_alive_s(value: object, *, field: str) -> float:
    """Seconds of a keep_alive as it may be written (negative: for ever); ConfigError otherwise."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return parse_duration(str(value), field=field)
