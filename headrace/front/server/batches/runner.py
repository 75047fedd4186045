"""Runs batches beside the requests of the server: a few at a time, each a few lines at a time.

What is killed in the middle is taken up again: answers are appended whole, and a line that has one
is not run again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError, NotFound, StorageFull, TooLarge
from headrace.front.server.batches.lines import answered_ids, check_lines, run_lines
from headrace.front.server.conversation.context import Services
from headrace.front.server.state.batches import (
    OVER,
    BatchStore,
    Counts,
    LineError,
    Status,
    StoredBatch,
)
from headrace.front.server.state.files import FileInfo, FileStore, new_file_id, room_on_disk

POLL_S = 0.5
FULL_PAUSE_S = 5.0
"""Pause between two looks whether a full disk has room again."""
BATCHES_AT_ONCE = 2
LINES_AT_ONCE = 16
_HANDED_OVER = {"output": "output_file_id", "errors": "error_file_id"}
log = logging.getLogger(__name__)


class Stopped(Exception):
    """The batch shall not go on: cancelled, expired, or the server drains."""


class BatchRunner:
    """The batches of one server process."""

    def __init__(self, services: Services, files: FileStore, batches: BatchStore) -> None:
        self._services = services
        self._files = files
        self._batches = batches
        self._running: dict[str, asyncio.Task[None]] = {}
        self._look_at = 0.0

    async def run(self) -> None:
        """Looks for batches nobody runs, for ever; ends what it runs when it is cancelled."""
        try:
            while True:
                try:
                    if self._services.ready:
                        await self._take_up()
                except OSError:
                    log.exception("the folder of batches cannot be read")
                await asyncio.sleep(POLL_S)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_up(self) -> None:
        if self._batches.paused and not await self._may_resume():
            return
        for batch in await asyncio.to_thread(self._batches.unfinished):
            if len(self._running) >= BATCHES_AT_ONCE:
                return
            if batch.id not in self._running:
                task = asyncio.ensure_future(self._one(batch))
                self._running[batch.id] = task
                task.add_done_callback(partial(self._ended, batch.id))

    async def _may_resume(self) -> bool:
        """After a pause: whether the disk has room again."""
        if time.monotonic() < self._look_at:
            return False
        try:
            await asyncio.to_thread(self._batches.check_room)
        except StorageFull:
            self._look_at = time.monotonic() + FULL_PAUSE_S
            return False
        log.warning("batches go on: the disk has room again")
        self._batches.paused = ""
        return True

    def _pause(self, batch: StoredBatch, why: str) -> None:
        """Batches wait as they are: answers would be computed that nobody could keep."""
        log.error("batch %s pauses: %s", batch.id, why)
        self._batches.paused = why
        self._look_at = time.monotonic() + FULL_PAUSE_S

    def _ended(self, ident: str, _: object) -> None:
        del self._running[ident]

    async def _one(self, batch: StoredBatch) -> None:
        """Runs a batch as far as it is not. What is known of it is read under its lock: since it
        was listed, another run may have ended it."""
        with self._batches.lock(batch) as mine:
            if not mine:
                await asyncio.sleep(POLL_S)
                return
            try:
                batch = self._batches.get(batch.id, batch.owner)
            except NotFound:
                return
            if batch.status in OVER:
                return
            try:
                await self._run(batch)
            except StorageFull as error:
                self._pause(batch, error.message)

    async def _run(self, batch: StoredBatch) -> None:
        try:
            with room_on_disk():
                await self._through(batch)
        except StorageFull:
            raise
        except HeadraceError as error:
            log.warning("batch %s failed: %s", batch.id, error.message)
            await self._fail(batch, error.message)
        except Exception:
            log.exception("batch %s failed", batch.id)
            await self._fail(batch, "internal error")

    async def _through(self, batch: StoredBatch) -> None:
        if batch.ends_as is not None:
            self._hand_over(batch)
            return
        info = self._files.get(batch.input_file_id, batch.owner)
        if batch.counts.total == 0:
            with self._files.open(info) as file:
                total, errors = await asyncio.to_thread(
                    check_lines,
                    file,
                    endpoint=batch.endpoint,
                    max_line_bytes=self._services.server.max_body_bytes,
                )
            if errors:
                self._batches.put(batch.now("failed", errors=errors))
                return
            batch = batch.now("in_progress", counts=Counts(total=total))
            self._batches.put(batch)
        try:
            await self._answers(batch, info)
        except Stopped:
            if self._services.draining:
                return  # the next start goes on
            cancelled = self._batches.asked_cancel(batch)
            await self._finish(batch, "cancelled" if cancelled else "expired")
            return
        await self._finish(batch, "completed")

    async def _answers(self, batch: StoredBatch, info: FileInfo) -> None:
        output, errors = (self._batches.path(batch, name) for name in ("output", "errors"))
        completed = await _to_the_end(answered_ids, output)
        failed = await _to_the_end(answered_ids, errors)
        counts = Counts(total=batch.counts.total, completed=len(completed), failed=len(failed))
        with (
            self._files.open(info) as file,
            output.open("ab") as good,
            errors.open("ab") as bad,
        ):
            answers = run_lines(
                self._services,
                batch.owner,
                file,
                endpoint=batch.endpoint,
                done=completed | failed,
                at_once=LINES_AT_ONCE,
                max_line_bytes=self._services.server.max_body_bytes,
            )
            written = time.monotonic()
            room = self._files.room(batch.owner) - output.stat().st_size - errors.stat().st_size
            async with contextlib.aclosing(_watched(answers, lambda: self._stop(batch))) as lines:
                async for answered in lines:
                    room -= len(answered.written)
                    if room < 0:
                        raise TooLarge("the file store has no room for more answers of this key")
                    sink = good if answered.ok else bad
                    sink.write(answered.written)
                    sink.flush()
                    counts = Counts(
                        total=counts.total,
                        completed=counts.completed + answered.ok,
                        failed=counts.failed + (not answered.ok),
                    )
                    if time.monotonic() - written > POLL_S:
                        written = time.monotonic()
                        self._batches.put(msgspec.structs.replace(batch, counts=counts))

    async def _fail(self, batch: StoredBatch, message: str) -> None:
        """Ends a batch whose run failed. `batch` is as the run began: how many lines there are may
        have been written down since."""
        wrong = LineError(code="batch_failed", line=0, message=message)
        batch = self._batches.get(batch.id, batch.owner)
        await self._finish(batch, "failed", errors=[wrong])

    def _stop(self, batch: StoredBatch) -> bool:
        return (
            self._services.draining
            or time.time() > batch.expires_at
            or self._batches.asked_cancel(batch)
        )

    async def _finish(self, batch: StoredBatch, status: Status, **changes: Any) -> None:
        """Ends the batch: first it is written down how, and under which ids its files will be
        found, so that whoever takes it up after a death in between ends it the same way."""
        numbers = {}
        for name, field in _HANDED_OVER.items():
            answers = await _to_the_end(answered_ids, self._batches.path(batch, name))
            numbers[name] = len(answers)
            changes[field] = new_file_id() if answers else None
        counts = Counts(
            total=batch.counts.total, completed=numbers["output"], failed=numbers["errors"]
        )
        ending = batch.now("finalizing", ends_as=status, counts=counts, **changes)
        self._batches.put(ending)
        self._hand_over(ending)

    def _hand_over(self, batch: StoredBatch) -> None:
        """The answers become files of the owner, as far as they are not yet; the batch is over
        then."""
        assert batch.ends_as is not None, f"{batch.id} has not ended"
        for name, field in _HANDED_OVER.items():
            path, ident = self._batches.path(batch, name), getattr(batch, field)
            if ident is None:
                path.unlink(missing_ok=True)
            elif not self._files.has(ident):
                self._files.adopt(path, _adopted(batch, name, ident))
        self._batches.put(batch.now(batch.ends_as))
        self._batches.path(batch, "cancel").unlink(missing_ok=True)


def _adopted(batch: StoredBatch, name: str, ident: str) -> FileInfo:
    return FileInfo(
        id=ident,
        owner=batch.owner,
        filename=f"{batch.id}_{name}.jsonl",
        purpose="batch_output",
        created_at=int(time.time()),
    )


async def _to_the_end(read: Callable[[Path], set[str]], path: Path) -> set[str]:
    """Reads in a thread. Who is cancelled meanwhile waits for it: it may cut the file, which needs
    the batch's lock."""
    reading = asyncio.ensure_future(asyncio.to_thread(read, path))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait({reading})
        raise


async def _watched(answers: Any, stop: Any) -> Any:
    """The answers, until `stop` says so; looked at between answers and at least every POLL_S."""
    async with contextlib.aclosing(answers):
        pending: asyncio.Future[Any] | None = None
        try:
            while True:
                if stop():
                    raise Stopped
                pending = pending or asyncio.ensure_future(anext(answers, None))
                await asyncio.wait({pending}, timeout=POLL_S)
                if not pending.done():
                    continue
                answered, pending = pending.result(), None
                if answered is None:
                    return
                yield answered
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
