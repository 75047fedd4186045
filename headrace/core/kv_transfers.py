"""KV that passes between servers which share a folder (of shared memory, or of a file system): one
computes a prompt, another answers it.

    sends       when the request ends, the blocks of its prompt that the prefix cache holds are
                copied to a file, named by the transfer and the tenant, for a while
    receives    the request waits in its place in the queue until the file is there and its blocks
                lie in the prefix cache, where it finds them as it would any prefix

Blocks are named by the tokens of the request that receives, never by what a file says: one that is
of another prompt, late, damaged or gone costs a recomputation (or, by option, the request), and
never gives another answer. Who waits holds nothing; blocks are taken when a file is read, and are
free again once it has been.

A file belongs to nobody but the two: it is removed by the one that has read it, or, when it is
older than the lease, by whoever next looks into the folder. While one is being written `.part`
stands behind its name; that is there before the request's end is told. Who waits goes on waiting as
long as such a mark is renewed, and no longer once it has gone.

Where there is no common folder files are pushed into that of the peer which the request names
(launch/kv_push.py): announced when it comes, sent when it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.base.config.resolved import KVTransferSpec
from headrace.base.errors import Conflict, HeadraceError, InvalidRequest, NotFound, Unsupported
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.slots import KVReply, SavedConversation
from headrace.base.wire.transfer import TRANSFER_HOOK, KVTransfer, unpack_transfer
from headrace.core.kv.prefix_copy import PrefixCopy, hold, take
from headrace.core.kv_files import KVFileHook
from headrace.core.ports import AdmissionVerdict, none_computed
from headrace.core.reports import EngineView
from headrace.core.request import TOKEN_BYTES, Request
from headrace.core.service_state import TransferCounts
from headrace.core.slots import check_saved, read_saved
from headrace.core.weights import Result

log = logging.getLogger(__name__)
FIELD = "kv_transfer_params"
MAX_FILES = 10_000
_SUFFIX = ".hrkv"
_YES = AdmissionVerdict("yes")
_NOT_THERE = AdmissionVerdict("not_now", "the KV of its prompt has not come yet")
_LOADING = AdmissionVerdict("not_now", "the KV of its prompt is being read")


@dataclass(eq=False, slots=True)
class _Held:
    """A request that sends or receives. `is_settled`: it need not wait for anything; `error`: nor
    can it run. `mark`: when what is coming was last written to; `push`: where its file goes."""

    wire: EngineRequest
    transfer: KVTransfer
    since: float
    is_settled: bool
    is_loading: bool = False
    error: HeadraceError | None = None
    mark: int = 0
    push: AnnouncedTransfer | None = None


class AnnouncedTransfer(Protocol):
    """A transfer that was announced to another server."""

    def send(self, files: list[Path]) -> None:
        """Sends the files, which are removed then, whatever becomes of it."""
        ...

    def cancel(self) -> None:
        """Nothing is sent: the receiver need not wait."""
        ...


class Pushes(Protocol):
    """Transfers to other servers."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Those that may be named."""
        ...

    def begin(self, peer: str, name: str, num_files: int) -> AnnouncedTransfer | None:
        """Announces a transfer; None: too many are on their way."""
        ...

    def ended(self) -> list[str | None]:
        """Of the transfers that have ended since the last call the reason why they did not arrive;
        None: they did, or nothing was to be sent."""
        ...


class KVTransfers(KVFileHook):
    """The transfers of one core. See the top of the file."""

    name = TRANSFER_HOOK

    def __init__(
        self,
        spec: KVTransferSpec,
        num_ranks: int,
        engine: Callable[[], EngineView],
        pushes: Pushes | None = None,
    ) -> None:
        super().__init__(spec.path, num_ranks, engine)
        self._spec, self._pushes = spec, pushes
        self._held: dict[int, _Held] = {}
        swept(self._folder, spec.lease_s)

    @property
    def counts(self) -> TransferCounts:
        """What went out and came in."""
        self._settle_pushes()
        return self._engine().counters.transfers

    @property
    def num_held(self) -> int:
        """See AdmissionHook."""
        return len(self._held)

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        raw = request.hook_payloads.get(TRANSFER_HOOK)
        if raw is None:
            return _YES
        transfer = unpack_transfer(raw)
        for what, has in (
            ("an adapter", request.adapter),
            ("media", request.media),
            ("control vectors", request.sampling.control_vectors),
        ):
            if has:
                why = f"{FIELD}: the KV of a prompt with {what} passes to no other server"
                raise Unsupported(why, field=FIELD)
        held = _Held(request, transfer, self._engine().clock(), not transfer.receives)
        held.push = self._announced(request, transfer)
        self._held[request.id] = held
        return _YES

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook: waits for the file, and for its blocks."""
        held = self._held.get(request_id)
        if held is None:
            return _YES
        verdict = _YES
        if not held.is_settled:
            verdict = _LOADING if held.is_loading else self._look(held)
        if held.error is not None:
            raise held.error
        return _YES if held.is_settled else verdict

    def finish(self, request_id: int) -> None:
        """See AdmissionHook: what the request sends goes out now."""
        held = self._held.pop(request_id, None)
        if held is None or not held.transfer.sends:
            return
        try:
            self._send(held)
        except (HeadraceError, OSError) as error:
            if held.push is not None:
                held.push.cancel()
            self.counts.failed += 1
            log.warning("the KV of a prompt was not sent: %s", _said(error))

    # the one that computes

    def _announced(self, wire: EngineRequest, transfer: KVTransfer) -> AnnouncedTransfer | None:
        if not transfer.peer:
            return None
        if self._pushes is None or transfer.peer not in self._pushes.peers:
            raise InvalidRequest(
                f"{FIELD}.remote_host: {transfer.peer!r} is no peer of this server (--kv-transfer-peers)",
                field=FIELD,
            )
        self._settle_pushes()
        push = self._pushes.begin(
            transfer.peer, self._path(wire, transfer.sends).name, self._num_ranks
        )
        if push is None:
            raise Conflict(f"{FIELD}: too many transfers are on their way; try again later")
        return push

    def _settle_pushes(self) -> None:
        """Those that have ended make room for others, and count where they failed."""
        for reason in () if self._pushes is None else self._pushes.ended():
            if reason is not None:
                self._engine().counters.transfers.failed += 1
                log.warning("the KV of a prompt was not pushed: %s", reason)

    def _send(self, held: _Held) -> None:
        engine = self._engine()
        if not engine.service.has_executor or engine.weights.blocks_resume:
            raise Conflict("the engine has no weights at the moment, or others")
        request = self._request(held.wire)
        copy = hold(engine.kv, request)
        if copy is None:
            raise Conflict(
                f"of its {request.num_prompt} tokens no whole block of {engine.kv.block_tokens} is cached"
            )
        try:
            self._write(held, request, copy)
        except BaseException:
            copy.release()
            raise

    def _write(self, held: _Held, request: Request, copy: PrefixCopy) -> None:
        engine, wire = self._engine(), request.wire
        path = self._path(wire, held.transfer.sends)
        saved = SavedConversation(
            tokens=wire.prompt,
            computed=copy.num_tokens,
            tenant=wire.tenant,
            cache_salt=wire.cache_salt,
            extra_keys=wire.extra_keys,
            block_tokens=engine.kv.block_tokens,
            groups=engine.kv.groups,
            blocks=copy.places,
            num_ranks=self._num_ranks,
        )
        header = msgspec.msgpack.encode(saved)
        self._check_room(self._num_ranks * (copy.num_bytes + len(header)))
        files = self._files(path)
        if any(file.exists() for file in files):
            raise Conflict(f"a transfer of the name {path.stem} lies there already")
        marks = [Path(f"{file}.part") for file in files]
        for mark in marks:
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        try:
            pending = self._order("save", path, copy.blocks, header)
        except HeadraceError:
            for mark in marks:
                mark.unlink(missing_ok=True)
            raise
        engine.weights.attend(pending, partial(self._sent, held, path, copy))

    def _sent(self, held: _Held, path: Path, copy: PrefixCopy, reply: KVReply) -> Result:
        copy.release()
        if held.push is not None and reply.error is None:
            held.push.send(self._files(path))
        elif held.push is not None:
            held.push.cancel()
        if reply.error is None:
            self.counts.sent += 1
            self.counts.sent_tokens += copy.num_tokens
        else:
            self.counts.failed += 1
            log.warning("the KV of a prompt was not sent: %s", reply.error.message)
        return {}

    def _check_room(self, num_bytes: int) -> None:
        total, count = swept(self._folder, self._spec.lease_s)
        if count >= MAX_FILES or total + num_bytes > self._spec.max_bytes:
            raise Conflict(
                f"{num_bytes} bytes more are too many: {count} files take {total} of the "
                f"{self._spec.max_bytes} of --kv-transfer-bytes"
            )

    # the one that answers

    def _look(self, held: _Held) -> AdmissionVerdict:
        """Begins to read the file, if it is there."""
        path = self._path(held.wire, held.transfer.receives)
        files = self._files(path)
        is_coming = self._is_coming(held, files)  # first: a mark becomes the file
        if not all(file.exists() for file in files):
            if is_coming and self._has_time(held):
                return _NOT_THERE
            self._fail(held, NotFound("nothing of that name is there (any more)"))
            return _YES
        try:
            return self._load(held, path)
        except (HeadraceError, OSError) as error:
            self._remove_files(path)
            self._fail(held, error)
            return _YES

    def _is_coming(self, held: _Held, files: list[Path]) -> bool:
        """Whether somebody writes the files or will. As long as they do, there is time."""
        mark = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                mark = max(mark, Path(f"{file}.part").stat().st_mtime_ns)
        if mark > held.mark and held.mark:
            held.since = self._engine().clock()
        was_coming, held.mark = held.mark > 0, mark or held.mark
        return mark > 0 or not (held.transfer.is_sent or was_coming)

    def _has_time(self, held: _Held) -> bool:
        return self._engine().clock() < held.since + self._spec.lease_s

    def _load(self, held: _Held, path: Path) -> AdmissionVerdict:
        engine, wire = self._engine(), held.wire
        saved = read_saved(path)
        check_saved(engine, saved, num_ranks=self._num_ranks, tenant=wire.tenant)
        size = saved.computed * TOKEN_BYTES
        theirs = saved.tokens[:size], saved.cache_salt, saved.extra_keys
        if theirs != (wire.prompt[:size], wire.cache_salt, wire.extra_keys):
            raise Conflict("it is of another prompt")
        request, hit = self._request(wire), saved.computed // engine.kv.block_tokens
        if engine.kv.match(request) >= hit:
            self._settle(held, path)
            return _YES
        try:
            copy = take(engine.kv, request, hit, saved.blocks)
        except Conflict as full:
            if self._has_time(held):
                return AdmissionVerdict("not_now", _said(full))
            raise
        try:
            pending = self._order("load", path, copy.blocks)
        except HeadraceError:
            copy.release(forget=True)
            raise
        held.is_loading = True
        engine.weights.attend(pending, partial(self._received, held, path, copy))
        return _LOADING

    def _received(self, held: _Held, path: Path, copy: PrefixCopy, reply: KVReply) -> Result:
        if reply.error is None:
            copy.adopt()
            self._settle(held, path)
            self.counts.received += 1
            self.counts.received_tokens += copy.num_tokens
        else:
            copy.release(forget=True)
            self._remove_files(path)
            self._fail(held, Conflict(reply.error.message))
        return {}

    def _settle(self, held: _Held, path: Path) -> None:
        held.is_settled = True
        self._remove_files(path)

    def _fail(self, held: _Held, error: Exception) -> None:
        """The prompt is computed here, or the request ends, as the option says."""
        self.counts.failed += 1
        held.is_settled, why = True, _said(error)
        if self._spec.recomputes:
            log.warning("the KV of a prompt did not come, it is computed again: %s", why)
            return
        held.error = Conflict(
            f"{FIELD}: the KV of the prompt did not come: {why}; with --kv-load-failure recompute it would "
            "be computed here",
            field=FIELD,
        )

    # both

    def _path(self, wire: EngineRequest, name: str) -> Path:
        """Where a transfer of a tenant lies: names of tenants do not meet, and are no paths."""
        digest = blake2b(f"{wire.tenant}\0{name}".encode(), digest_size=20).hexdigest()
        return self._folder / f"{digest}{_SUFFIX}"


def swept(folder: Path, lease_s: float) -> tuple[int, int]:
    """Removes transfers that are older than the lease; the bytes and the number of the other
    files."""
    total = count = 0
    oldest = time.time() - lease_s
    with os.scandir(folder) as entries:
        for entry in entries:
            if _SUFFIX not in entry.name or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = entry.stat(follow_symlinks=False)
                if facts.st_mtime < oldest:
                    os.unlink(entry.path)
                else:
                    total, count = total + facts.st_size, count + 1
    return total, count


def _said(error: Exception) -> str:
    """The reason, without the field that files of conversations are named by."""
    text = error.message if isinstance(error, HeadraceError) else str(error)
    return text.removeprefix("filename: ")
