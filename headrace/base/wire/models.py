"""The messages between an API process and the pool of models in its parent, where one server has
several models.

An API process asks for a model before its first request to it and gives it back after the last one:
so the parent knows which models are in use, and none of them loses its core. Models go by their
place in the catalog.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from headrace.base.errors import WireError


class ModelStatus(Enum):
    """What the parent says of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    UNLOADING = "unloading"
    FAILED = "failed"


class ModelPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalog, as an API process knows it. `names`: its own, aliases, and those of
    its adapters. `engine_path`, `text_path`: files with its EngineSpec and TextSpec, "" where it
    cannot be served because of `error`."""

    name: str
    names: tuple[str, ...]
    max_model_len: int = 0
    engine_path: str = ""
    text_path: str = ""
    error: str = ""


class WantModel(msgspec.Struct, frozen=True, kw_only=True, tag="want"):
    """A request needs this model: answered once it is loaded, and held from then on. `ids` are the
    names by which the request may be asked about meanwhile, `tenant` whose it is."""

    number: int
    model: int
    ids: tuple[str, ...] = ()
    tenant: str = ""


class LeaveModel(msgspec.Struct, frozen=True, tag="leave"):
    """Whoever waited for the answer to this number has left."""

    number: int


class ReleaseModel(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Gives a model back as often as it was granted. `keep_alive_s`: it shall stay so long without
    requests (negative: for ever; None: as configured)."""

    model: int
    count: int
    keep_alive_s: float | None = None


class ChangeModel(msgspec.Struct, frozen=True, kw_only=True, tag="change"):
    """Loads a model, or unloads it once it is idle; answered when that is done."""

    number: int
    model: int
    load: bool


class ListModels(msgspec.Struct, frozen=True, tag="list"):
    """Answered with a list of ServedModelState."""

    number: int


class ExplainWait(msgspec.Struct, frozen=True, kw_only=True, tag="explain"):
    """Answered with why the requests of this name wait for a model: those of one tenant, None: of
    all."""

    number: int
    id: str
    tenant: str | None = None


class PoolReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to the message of this number."""

    number: int
    error: WireError | None = None
    result: msgspec.Raw = msgspec.Raw(b"\xc0")


class ModelClosed(msgspec.Struct, frozen=True, tag="closed"):
    """Further requests to this model are to ask first, also where some run."""

    model: int


class ModelGone(msgspec.Struct, frozen=True, tag="gone"):
    """The model's core has ended."""

    model: int


class ServedModelState(msgspec.Struct, frozen=True, kw_only=True):
    """A model as GET /v1/models shows it. `num_bytes`: what it takes of the budget while it is
    loaded; times are Unix times. `expires_at`: when it is unloaded unless a request comes, None:
    never, or it is in use or not loaded."""

    name: str
    status: str
    why: str
    num_bytes: int
    since: float
    in_use: bool
    num_waiting: int
    pinned: bool
    priority: int
    load_s: float | None = None
    expires_at: float | None = None


ToPool: TypeAlias = WantModel | LeaveModel | ReleaseModel | ChangeModel | ListModels | ExplainWait
FromPool: TypeAlias = PoolReply | ModelClosed | ModelGone
