"""What a request says beside its prompt of how the engine is to treat it: how long the KV of parts
of its prompt is worth keeping (`kv_retention`), and with whom it likes to run (`routing_key`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.base.wire.transfer import KVTransferParams

RETENTION = "kv_retention"
"""Key of a list of `KVRetention` in `EngineRequest.hook_payloads`."""
ROUTING_KEY = "routing_key"
"""Key of a text in `EngineRequest.hook_payloads`: requests of one key like to run together."""
DEFAULT_PRIORITY = 35
MAX_RANGES = 16


class KVRetention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens `start` to `end` of the prompt (`end` left out: to its end): blocks that lie in them,
    in whole or in part, go after all of a lower `priority` (0 to 100, without one 35), for
    `duration_s`, or as long as they last."""

    start: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    end: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    priority: Annotated[int, Meta(ge=0, le=100)]
    duration_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end is {self.end}, more than start ({self.start}) is wanted")


def pack_retention(ranges: Sequence[KVRetention]) -> msgspec.Raw:
    """The ranges as they stand in `EngineRequest.hook_payloads`."""
    return msgspec.Raw(msgspec.msgpack.encode(ranges))


def unpack_retention(raw: msgspec.Raw) -> list[KVRetention]:
    """The ranges of a request; InvalidRequest if they are none."""
    try:
        return msgspec.msgpack.decode(raw, type=list[KVRetention])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{RETENTION}: {error}", field=RETENTION) from None


class EngineHints(msgspec.Struct, frozen=True, kw_only=True):
    """All that a request says so. `transfer`: of KV that passes between servers."""

    transfer: KVTransferParams | None = None
    retention: tuple[KVRetention, ...] = ()
    routing_key: str = ""

    def payloads(self, label: str) -> dict[str, msgspec.Raw]:
        """What the engine gets, by hook; `label`: the public id of the answer."""
        payloads = {} if self.transfer is None else self.transfer.payloads(label)
        if self.retention:
            payloads[RETENTION] = pack_retention(self.retention)
        if self.routing_key:
            payloads[ROUTING_KEY] = msgspec.Raw(msgspec.msgpack.encode(self.routing_key))
        return payloads


def without_transfer(hints: KVTransferParams | EngineHints | None) -> EngineHints | None:
    """What of a request's hints holds for each of its answers."""
    if not isinstance(hints, EngineHints):
        return None
    return msgspec.structs.replace(hints, transfer=None)
