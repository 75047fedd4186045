"""The last conversation of each row, as llama.cpp's server has slots: its KV saved to a file below
the configured folder, restored from one, or erased.

A row keeps nothing when its request has ended; what is saved is what the prefix cache still
holds of that request's tokens, and a restored conversation is put back there, under the keys of
the tenant it was of. The workers copy the blocks beside the steps (ports.KVWorkers); a file
names what it was made with, and is refused where that differs.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import (
    Conflict,
    HeadraceError,
    InvalidRequest,
    NotFound,
    StorageFull,
    Unsupported,
    from_wire,
    to_wire,
)
from headrace.base.wire.control import Call, Reply
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.base.wire.slots import (
    FORMAT,
    KVOrder,
    KVReply,
    SavedConversation,
    opened,
    take_header,
)
from headrace.base.wire.step import KVGroup
from headrace.core import reports
from headrace.core.kv.prefix_copy import PrefixCopy, hold, take
from headrace.core.output_processor import OutputBuffer
from headrace.core.ports import KVWorkers
from headrace.core.reports import EngineView
from headrace.core.request import TOKEN_BYTES, Request, RowsInTurns, RowTable

MAX_FILES = 10_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_OFF = (
    "slots are neither saved nor restored here: start the server with --slot-save-path FOLDER. What a "
    "conversation leaves lies in the prefix cache, where every request that begins alike finds it"
)


class SlotEngine(EngineView, Protocol):
    """What is asked of the engine core."""

    @property
    def output_buffer(self) -> OutputBuffer:
        """Where replies go that come later than their call."""
        ...


class RememberingRows(RowTable):
    """Rows that remember the last request of each, of text alone. `folder`: where conversations are
    saved, `max_bytes` together. `core`: what tells this core from the others of a server."""

    def __init__(self, spec: EngineSpec, folder: str, num_rows: int) -> None:
        super().__init__(num_rows, spec.kv.block_tokens)
        self.folder = Path(folder)
        self.max_bytes = spec.kv.slot_save_bytes
        self.num_ranks = spec.device.world_size
        self.core = secrets.token_hex(8)
        self.last: list[Request | None] = [None] * num_rows

    def release(self, request: Request) -> int:
        """See RowTable."""
        self.flush_rest(request)
        row = super().release(request)
        plain = not request.media and request.wire.pooling is None
        self.last[row] = request if plain else None
        return row


class RememberingRowsInTurns(RememberingRows, RowsInTurns):
    """Both, for the stages of a pipeline."""

    def __init__(self, spec: EngineSpec, folder: str, num_rows: int) -> None:
        super().__init__(spec, folder, num_rows)
        self.parts = spec.scheduler.stages


def rows_of(spec: EngineSpec, num_rows: int) -> RowTable:
    """The rows of a core."""
    folder, stages = spec.kv.slot_save_path, spec.scheduler.stages
    if folder is not None and stages > 1:
        return RememberingRowsInTurns(spec, folder, num_rows)
    if folder is not None:
        return RememberingRows(spec, folder, num_rows)
    if stages > 1:
        return RowsInTurns(num_rows, spec.kv.block_tokens, parts=stages)
    return RowTable(num_rows, spec.kv.block_tokens)


def listed(engine: EngineView, call: Call) -> dict[str, object]:
    """Every row (reports.slots), with the tokens of the conversation that it remembers."""
    tenant = call.arguments.get("tenant")
    known = None if tenant is None else str(tenant)
    slots, rows = reports.slots(engine, tenant=known), engine.rows
    if isinstance(rows, RememberingRows):
        for slot, request in zip(slots, rows.last, strict=True):
            if request is not None and known in (None, request.wire.tenant):
                slot |= {"id_task": request.wire.label, "n_past": request.num_tokens}
        return {"slots": slots, "core": rows.core}
    return {"slots": slots}


def carry_out(engine: SlotEngine, call: Call) -> dict[str, object] | None:
    """Saves, restores or erases (`action`) the conversation of `row` of a tenant, in or from the
    file `name`; answered once it is done. Every core is asked, and the one named `core` does it."""
    rows = engine.rows
    if not isinstance(rows, RememberingRows):
        raise Unsupported(_OFF)
    if call.arguments["core"] != rows.core:
        return {}
    if not engine.service.has_executor:
        raise Conflict("the engine is asleep: wake it first")
    arguments = call.arguments
    row, tenant = int(cast(int, arguments["row"])), str(arguments.get("tenant") or "")
    if arguments["action"] == "erase":
        return _erase(engine, _conversation(rows, row, tenant))
    name = str(arguments.get("name") or "")
    if not _NAME.fullmatch(name) or name.endswith(".part"):
        raise InvalidRequest(
            f"filename: {name!r:.100} given; a plain name is wanted: letters, digits, _, - and ., at "
            "most 200",
            field="filename",
        )
    path = rows.folder / name
    tell = partial(_tell, engine.output_buffer, call.number, time.monotonic())
    if arguments["action"] == "save":
        _save(engine, _conversation(rows, row, tenant), path, rows, tell)
    else:
        _restore(engine, row, path, rows, tenant, tell)
    return None


Tell = Callable[[dict[str, object] | HeadraceError], None]


def _tell(
    buffer: OutputBuffer, number: int, began: float, result: dict[str, object] | HeadraceError
) -> None:
    if isinstance(result, HeadraceError):
        buffer.add_reply(Reply(number=number, error=to_wire(result)))
        return
    took = {**result, "ms": round(1000 * (time.monotonic() - began), 3)}
    buffer.add_reply(Reply(number=number, result=msgspec.Raw(msgspec.msgpack.encode(took))))


def _conversation(rows: RememberingRows, row: int, tenant: str) -> Request:
    """The last request of a row."""
    if rows.requests[row] is not None:
        raise Conflict(f"id: slot {row} is processing a request; try again once it has ended")
    request = rows.last[row]
    if request is None or request.wire.tenant != tenant:
        raise NotFound(
            f"id: slot {row} has had no conversation of this key yet, or one with images, video or sound",
            field="id",
        )
    if request.wire.sampling.control_vectors:
        raise Unsupported(
            f"id: the conversation of slot {row} ran with control vectors", field="id"
        )
    if request.adapter.keys:
        raise Unsupported(
            f"id: the conversation of slot {row} ran with the adapter {request.adapter.name!r}; only those "
            "of the base are saved",
            field="id",
        )
    return request


def _held(engine: SlotEngine, request: Request) -> PrefixCopy:
    copy = hold(engine.kv, request)
    if copy is None:
        raise Conflict(
            f"id: nothing of the conversation's {request.num_tokens} tokens is left in the prefix cache "
            f"(whole blocks of {engine.kv.block_tokens} are kept, until others need the room)"
        )
    return copy


def _erase(engine: SlotEngine, request: Request) -> dict[str, object]:
    copy = hold(engine.kv, request)
    rows = cast(RememberingRows, engine.rows)
    rows.last[rows.last.index(request)] = None
    if copy is None:
        return {"tokens": 0}
    copy.release(forget=True)
    return {"tokens": copy.num_tokens}


def _save(
    engine: SlotEngine, request: Request, path: Path, rows: RememberingRows, tell: Tell
) -> None:
    copy = _held(engine, request)
    wire, ranks = request.wire, rows.num_ranks
    saved = SavedConversation(
        tokens=request.token_bytes(0, request.num_tokens),
        computed=copy.num_tokens,
        tenant=wire.tenant,
        cache_salt=wire.cache_salt,
        extra_keys=wire.extra_keys,
        block_tokens=engine.kv.block_tokens,
        groups=engine.kv.groups,
        blocks=copy.places,
        num_ranks=ranks,
    )
    header = msgspec.msgpack.encode(saved)
    order = KVOrder(
        action="save", path=str(path), blocks=copy.blocks, header=header, num_ranks=ranks
    )

    def settle(reply: KVReply) -> dict[str, object] | HeadraceError:
        copy.release()
        if reply.error is not None:
            return from_wire(reply.error)
        return {"tokens": copy.num_tokens, "num_bytes": reply.num_bytes}

    try:
        _check_room(rows, path, ranks * (copy.num_bytes + len(header)))
        engine.weights.accompany(partial(_workers(engine).move, order), settle, tell)
    except HeadraceError:
        copy.release()
        raise


def _check_room(rows: RememberingRows, path: Path, num_bytes: int) -> None:
    """StorageFull where all files together would be larger than they may be."""
    total = count = 0
    with os.scandir(rows.folder) as entries:
        for entry in entries:
            count += 1
            if not entry.name.startswith(path.name) and entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    if count > MAX_FILES or total + num_bytes > rows.max_bytes:
        raise StorageFull(
            f"filename: {num_bytes} bytes more are too many: {total} of --slot-save-bytes {rows.max_bytes} are "
            f"in use by {count} files (at most {MAX_FILES}); remove some",
            field="filename",
            retry_after_s=60.0,
        )


def _restore(
    engine: SlotEngine, row: int, path: Path, rows: RememberingRows, tenant: str, tell: Tell
) -> None:
    if rows.requests[row] is not None:
        raise Conflict(f"id: slot {row} is processing a request; try again once it has ended")
    saved = read_saved(path)
    check_saved(engine, saved, num_ranks=rows.num_ranks, tenant=tenant)
    request = Request(
        EngineRequest(
            id=0,
            prompt=saved.tokens,
            stop=StopRules(max_tokens=0),
            sampling=RowSampling(seed=0),
            tenant=tenant,
            cache_salt=saved.cache_salt,
            extra_keys=saved.extra_keys,
        ),
        arrival=0,
        now=engine.clock(),
        groups=len(engine.kv.groups),
        length_limit=len(saved.tokens) // TOKEN_BYTES,
    )
    copy = take(engine.kv, request, saved.computed // engine.kv.block_tokens, saved.blocks)
    order = KVOrder(action="load", path=str(path), blocks=copy.blocks, num_ranks=rows.num_ranks)

    def settle(reply: KVReply) -> dict[str, object] | HeadraceError:
        if reply.error is not None:
            copy.release(forget=True)
            return from_wire(reply.error)
        copy.adopt()
        if rows.requests[row] is None:
            rows.last[row] = request
        return {"tokens": copy.num_tokens, "num_bytes": reply.num_bytes}

    try:
        engine.weights.accompany(partial(_workers(engine).move, order), settle, tell)
    except HeadraceError:
        copy.release(forget=True)
        raise


def _workers(engine: SlotEngine) -> KVWorkers:
    return cast(KVWorkers, engine.executor)


def read_saved(path: Path) -> SavedConversation:
    """What a file says of its conversation."""
    name = path.name
    try:
        with _opened_first(path) as file:
            return msgspec.msgpack.decode(take_header(file), type=SavedConversation)
    except FileNotFoundError:
        raise NotFound(f"filename: there is no {name!r}", field="filename") from None
    except OSError as error:
        why = f"filename: {name!r} cannot be read: {error.strerror}"
        raise InvalidRequest(why, field="filename") from None
    except msgspec.DecodeError as error:
        why = f"filename: {name!r} is not what was saved: {error}"
        raise InvalidRequest(why, field="filename") from None


def _opened_first(path: Path) -> Any:
    try:
        return opened(str(path))
    except FileNotFoundError:
        return opened(f"{path}.rank0")


def check_saved(
    engine: EngineView, saved: SavedConversation, *, num_ranks: int, tenant: str
) -> None:
    """Refuses what cannot go on here, by name and numbers."""
    name, kv = "filename", engine.kv
    if saved.tenant != tenant:
        raise NotFound("filename: it was saved with another key", field=name)
    check_saved_form(engine, saved, num_ranks=num_ranks)
    tokens, rest = divmod(len(saved.tokens), TOKEN_BYTES)
    if rest or saved.computed % kv.block_tokens or not 0 < saved.computed < tokens:
        raise InvalidRequest(
            f"filename: {saved.computed} tokens with KV, of {tokens}; whole blocks of {kv.block_tokens} are "
            "wanted, and fewer than all",
            field=name,
        )
    most = engine.executor.facts.max_model_len
    if tokens > most:
        raise InvalidRequest(
            f"filename: {tokens} tokens, at most {most} are taken (--max-model-len)", field=name
        )


def check_saved_form(engine: EngineView, saved: SavedConversation, *, num_ranks: int) -> None:
    """Conflict where the blocks have another form than those here."""
    kv = engine.kv
    pairs = (
        ("format", saved.format, FORMAT),
        ("workers", saved.num_ranks, num_ranks),
        ("block_tokens", saved.block_tokens, kv.block_tokens),
        ("cache groups", len(saved.groups), len(kv.groups)),
    )
    for what, there, here in pairs:
        if there != here:
            raise Conflict(f"filename: {what} is {there} there and {here} here")
    for number, pair in enumerate(zip(saved.groups, kv.groups, strict=True)):
        theirs, ours = map(_form, pair)
        if theirs != ours:
            raise Conflict(
                f"filename: its KV has another form: group {number} has (kind, span, blocks, caches, "
                f"bytes) {theirs} there and {ours} here"
            )


def _form(group: KVGroup) -> tuple[object, ...]:
    """What must be the same of a group for its blocks to fit."""
    return group.kind, group.span, group.block_ratio, len(group.caches), group.block_bytes
