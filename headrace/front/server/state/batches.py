"""A batch and the folder that keeps batches: state in JSON, answers appended line by line, a lock
per batch.

Whoever holds a batch's lock runs it, in whichever process; when that process dies, another takes it
up where the answers end. A wish to cancel is a file beside it, so that any process can express it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.base.errors import NotFound
from headrace.front.server.state.files import private_folder, room_on_disk, write_whole

_ID = re.compile(r"batch_[0-9a-f]{32}\Z")


Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


OVER: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})


MAX_BATCHES = 1000
PROBE_BYTES = 1 << 18
"""What must fit on the disk before batches that have paused go on."""


log = logging.getLogger(__name__)


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a line (numbered from 1) before any is run."""

    code: str
    line: int
    message: str
    param: str | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests there are, were answered, and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a batch; times in seconds of the epoch. `ends_as`: its status once its files
    are handed over, under the ids that stand here already."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    ends_as: Status | None = None
    errors: list[LineError] = []
    counts: Counts = Counts()
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    metadata: dict[str, str] | None = None

    def now(self, status: Status, **changes: Any) -> StoredBatch:
        """The batch in another status, from this second on."""
        times = {**self.times, f"{status}_at": int(time.time())}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def shown(self) -> dict[str, Any]:
        """The object as clients see it: what has not happened is absent."""
        moments = (
            "in_progress",
            "finalizing",
            "completed",
            "failed",
            "expired",
            "cancelling",
            "cancelled",
        )
        listed = [msgspec.to_builtins(error) for error in self.errors]
        over = self.status in OVER
        document = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": listed} if listed else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if over else None,
            "error_file_id": self.error_file_id if over else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in moments},
            "request_counts": msgspec.to_builtins(self.counts),
        }
        shown = {name: value for name, value in document.items() if value is not None}
        return {**shown, "metadata": self.metadata}


class BatchStore:
    """The folder of batches. `paused`: why this process runs none of them now, or ""."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)
        self._over: set[str] = set()
        self.paused = ""

    def put(self, batch: StoredBatch) -> None:
        """Writes the state."""
        write_whole(self._folder / f"{batch.id}.json", batch)

    def get(self, ident: str, owner: str) -> StoredBatch:
        """The batch of that id, if it is this owner's; NotFound otherwise."""
        if _ID.match(ident):
            batch = self._read(self._folder / f"{ident}.json")
            if batch is not None and batch.owner == owner:
                return batch
        raise NotFound(f"no batch with the id {ident[:80]!r}", field="id")

    def of_owner(self, owner: str) -> list[StoredBatch]:
        """The owner's batches, newest first."""
        mine = [batch for batch in self._all() if batch.owner == owner]
        return sorted(mine, key=lambda batch: (-batch.created_at, batch.id))

    def check_room(self) -> None:
        """StorageFull if the disk has no room for some answers."""
        probe = self._folder / f"probe-{secrets.token_hex(4)}.part"
        try:
            with room_on_disk():
                probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def unfinished(self) -> list[StoredBatch]:
        """What is still to be done, oldest first."""
        batches = []
        for entry in self._folder.glob("batch_*.json"):
            if entry.name in self._over:  # what is over stays over, and is not read again
                continue
            batch = self._read(entry, raw=True)
            if batch is not None and batch.status in OVER:
                self._over.add(entry.name)
            elif batch is not None:
                batches.append(batch)
        return sorted(batches, key=lambda batch: batch.created_at)

    def forget_old(self, owner: str) -> bool:
        """Removes the owner's oldest finished batches until there is room; whether there is."""
        mine = self.of_owner(owner)
        for batch in reversed(mine):
            if len(mine) < MAX_BATCHES:
                break
            if batch.status in OVER:
                self.delete(batch)
                mine.remove(batch)
        return len(mine) < MAX_BATCHES

    def delete(self, batch: StoredBatch) -> None:
        """Forgets a batch that is over."""
        for suffix in ("json", "lock", "cancel", "output", "errors"):
            self.path(batch, suffix).unlink(missing_ok=True)

    def path(self, batch: StoredBatch, suffix: str) -> Path:
        """A file that belongs to a batch: output, errors, lock, cancel."""
        return self._folder / f"{batch.id}.{suffix}"

    def ask_cancel(self, batch: StoredBatch) -> None:
        """Whoever runs it shall stop."""
        self.path(batch, "cancel").touch(mode=0o600)

    def asked_cancel(self, batch: StoredBatch) -> bool:
        """Whether it shall stop."""
        return self.path(batch, "cancel").exists()

    @contextmanager
    def lock(self, batch: StoredBatch) -> Iterator[bool]:
        """Whether the batch is ours to run while the context lasts; given back by the kernel if we
        die."""
        descriptor = os.open(self.path(batch, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)

    def _all(self) -> Iterator[StoredBatch]:
        for entry in self._folder.glob("batch_*.json"):
            batch = self._read(entry)
            if batch is not None:
                yield batch

    def _read(self, path: Path, *, raw: bool = False) -> StoredBatch | None:
        try:
            batch = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            log.error("%s is no batch", path.name)
            return None
        if not raw and batch.status in ("validating", "in_progress") and self.asked_cancel(batch):
            return msgspec.structs.replace(batch, status="cancelling")
        return batch


def new_batch_id() -> str:
    """A fresh id."""
    return "batch_" + secrets.token_hex(16)
