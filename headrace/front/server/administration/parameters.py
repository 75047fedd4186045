"""What the operations of administration take: a struct for each, and its fields as rows, for those
who write them as words (a query, a command line)."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest

Mode = Literal["abort", "wait", "keep"]
PARTS = ("weights", "kv_cache")
MAX_IDS = 1024
Ids = Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(min_length=1, max_length=MAX_IDS)]


class NoParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Of an operation that takes none."""


class RequestsParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Which request."""

    id: Annotated[
        str, Meta(max_length=128, description="public id, or the x-request-id of its answer")
    ]


class ModelParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Which of several models."""

    model: Annotated[str, Meta(min_length=1, max_length=200, description="name of the model")]


class PauseParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of running requests, and of the cache."""

    mode: Annotated[
        Mode, Meta(description="what runs: abort ends it, wait lets it finish, keep freezes it")
    ] = "wait"
    clear_cache: Annotated[bool, Meta(description="forget cached prefixes")] = True


class ReloadParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights, and what becomes of running requests."""

    model: Annotated[
        str,
        Meta(
            max_length=4096,
            description="folder or GGUF file with weights of the same architecture; none: the "
            "present ones, read again",
        ),
    ] = ""
    mode: Annotated[
        Literal["abort", "wait"], Meta(description="what runs: abort ends it, wait lets it finish")
    ] = "wait"


class SleepParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How deep, and what becomes of running requests."""

    level: Annotated[
        Literal[0, 1, 2],
        Meta(
            description="0 only pauses; 1 moves the weights to host memory and gives the KV cache "
            "back; 2 drops both, and waking loads the weights again"
        ),
    ] = 1
    mode: Annotated[
        Mode, Meta(description="what runs: abort ends it, wait lets it finish, keep freezes it")
    ] = "wait"


class WakeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts; they come together once all have been named."""

    tags: Annotated[
        list[Annotated[str, Meta(max_length=64)]],
        Meta(max_length=16, description="weights, kv_cache; none: both"),
    ] = []


class ResetParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Whether running requests give their blocks up too."""

    reset_running_requests: Annotated[
        bool, Meta(description="running requests give their blocks up too, and are computed again")
    ] = False
    reset_external: Annotated[
        bool, Meta(description="changes nothing: there is no external cache")
    ] = False


class AbortParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests end: these public ids, or all."""

    request_ids: Annotated[Ids | None, Meta(description="public ids")] = None
    all: Annotated[bool, Meta(description="all requests, of every key")] = False


class ProfileParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Begins a trace, or ends it."""

    action: Annotated[Literal["start", "stop"], Meta(description="begin, or end and write")]


class LogLevelParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The level of every process's log."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="what is logged from now on")
    ]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A field. `kind`: bool, int, str, or list of texts; `choices`: all its values, if it has a
    list of them; a required one has no default."""

    name: str
    kind: type
    choices: tuple[Any, ...]
    required: bool
    doc: str


@cache
def parameters_of(struct: type[msgspec.Struct]) -> tuple[Parameter, ...]:
    """The fields of a struct, in their order."""
    hints = get_type_hints(struct, include_extras=True)
    return tuple(
        _parameter(field.name, hints[field.name], required=field.required)
        for field in msgspec.structs.fields(struct)
    )


def _parameter(name: str, hint: Any, *, required: bool) -> Parameter:
    doc = ""
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        parts = get_args(hint)
        if get_origin(hint) is Annotated:
            doc = doc or parts[1].description or ""
        hint = next(part for part in parts if part is not type(None))
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = type(choices[0]) if choices else get_origin(hint) or hint
    return Parameter(name=name, kind=kind, choices=choices, required=required, doc=doc)


def from_words(words: Mapping[str, Sequence[str]], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields among the words of a query, as JSON would have them; a repeated one is a list."""
    return {
        parameter.name: _value(words[parameter.name], parameter)
        for parameter in parameters_of(struct)
        if words.get(parameter.name)
    }


def _value(words: Sequence[str], parameter: Parameter) -> object:
    if parameter.kind is list:
        return list(words)
    word = words[-1]
    if parameter.kind is bool:
        if word.lower() not in ("true", "false", "1", "0"):
            raise InvalidRequest(
                f"{parameter.name}: {word[:50]!r} given; allowed: true, false", field=parameter.name
            )
        return word.lower() in ("true", "1")
    is_number = word.isascii() and word.isdecimal() and len(word) < 10
    return int(word) if parameter.kind is int and is_number else word
