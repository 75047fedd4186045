"""The store of responses and conversations: bounded in bytes (per owner and in all), expiring,
owner-bound, there after a restart.

An owner is the tenant of an API key; nothing of another owner is ever found, whatever id is asked
for. What a response was asked with is kept beside it, and which response came before: a
conversation is read by walking that chain, which also keeps all of it in use. Responses made in the
background write heartbeats while they run, so that one whose process died is known to be dead
(HEARTBEAT_TIMEOUT_S), and their events, so that any API process can follow and cancel them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.base.errors import ContextTooLong
from headrace.front.server.state.database import Database
from headrace.front.server.state.named_models import NamedModelStore
from headrace.front.server.state.sealing import SECRET_BYTES
from headrace.front.server.state.stored_chats import StoredChats

ROW_BYTES = 512


MAX_CHAIN = 4096


HEARTBEAT_TIMEOUT_S = 30.0


_TRIM_SHARE = 64


_TABLES = (
    """CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, used DOUBLE PRECISION NOT NULL, beat DOUBLE PRECISION NOT NULL,
        running INTEGER NOT NULL, cancelled INTEGER NOT NULL, previous TEXT, size BIGINT NOT NULL,
        response {bytes} NOT NULL, input {bytes} NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used, size)",
    "CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, used, size)",
    """CREATE TABLE IF NOT EXISTS response_events (
        id TEXT NOT NULL, number INTEGER NOT NULL, event {bytes} NOT NULL, PRIMARY KEY (id, number))""",
    "CREATE TABLE IF NOT EXISTS response_secret (one INTEGER PRIMARY KEY, secret {bytes} NOT NULL)",
)


_COLUMNS = "id, owner, previous, response, input, running, beat, cancelled"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One stored response: `response` and `input` (the items it was asked with) are JSON. Or one
    conversation: itself and its items."""

    id: str
    owner: str
    previous: str | None
    response: bytes
    input: bytes
    running: bool = False
    heartbeat_s: float = 0.0
    cancelled: bool = False

    @property
    def lost(self) -> bool:
        """Whether it was being made by a process that is gone."""
        return self.running and time.time() - self.heartbeat_s > HEARTBEAT_TIMEOUT_S


class ResponseStore:
    """See the module. Every method is one transaction off the event loop. `named_models` lie in the
    same database; `chats`: which of the records are chats, in order."""

    def __init__(
        self,
        database: Database,
        *,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self.named_models = NamedModelStore(database)
        self.chats = StoredChats(database)
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._untrimmed = max_bytes  # the first write trims what an earlier run left

    async def start(self) -> bytes:
        """Makes the tables where they are missing; the secret that all processes of this store
        share."""
        kind = "BYTEA" if self._database.is_postgres else "BLOB"

        def work(db: Database) -> bytes:
            for table in _TABLES:
                db.execute(table.format(bytes=kind))
            fresh = secrets.token_bytes(SECRET_BYTES)
            db.execute(
                "INSERT INTO response_secret VALUES (1, ?) ON CONFLICT (one) DO NOTHING", fresh
            )
            ((secret,),) = db.rows("SELECT secret FROM response_secret")
            return bytes(secret)

        return await self._database.run(work)

    async def close(self) -> None:
        """Ends the connection."""
        await self._database.close()

    async def put(self, record: Record) -> None:
        """Writes a response, also over an earlier state of it."""
        now = self._clock()
        size = len(record.response) + len(record.input) + ROW_BYTES
        values = (record.running, record.previous, size, record.response, record.input)
        self._untrimmed += size
        trim = self._untrimmed > self._max_bytes // _TRIM_SHARE

        def work(db: Database) -> None:
            db.execute(
                "INSERT INTO responses (id, owner, used, beat, cancelled, running, previous, "
                "size, response, input) "
                "VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET used = "
                "excluded.used, "
                "beat = excluded.beat, running = excluded.running, response = excluded.response, "
                "size = responses.size - length(responses.response) + length(excluded.response)",
                record.id,
                record.owner,
                now,
                now,
                int(values[0]),
                *values[1:],
            )
            if trim:
                self._trim(db, record.owner, now)

        await self._database.run(work)
        if trim:
            self._untrimmed = 0

    async def get(self, ident: str, owner: str) -> Record | None:
        """One response of this owner."""
        records = await self.chain(ident, owner, depth=1)
        return records[-1] if records else None

    async def chain(
        self, ident: str, owner: str, *, depth: int = MAX_CHAIN, max_bytes: int | None = None
    ) -> list[Record]:
        """A response and those before it, oldest first; [] if one of them is not there (any more).
        ContextTooLong if they hold more than `max_bytes`: that many are never in memory."""
        now = self._clock()

        def work(db: Database) -> list[Record]:
            records: list[Record] = []
            size = 0
            after: str | None = ident
            while after is not None and len(records) < depth:
                rows = db.rows(
                    f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ? AND used > ?",
                    after,
                    owner,
                    now - self._ttl_s,
                )
                if not rows:
                    return []
                records.append(_record(rows[0]))
                size += len(records[-1].response) + len(records[-1].input)
                if max_bytes is not None and size > max_bytes:
                    raise ContextTooLong(
                        f"previous_response_id: the conversation has more than {max_bytes} bytes; "
                        "compact it, or begin another one",
                        field="previous_response_id",
                    )
                db.execute("UPDATE responses SET used = ? WHERE id = ?", now, after)
                after = records[-1].previous
            return records[::-1]

        return await self._database.run(work)

    async def change(
        self, ident: str, owner: str, change: Callable[[Record], Record]
    ) -> Record | None:
        """Replaces what is kept of this owner under `ident` by what `change` makes of it, as one
        step; None if nothing is. What `change` raises leaves it as it was."""
        now = self._clock()

        def work(db: Database) -> Record | None:
            mine = (ident, owner, now - self._ttl_s)  # the update goes first: it locks the row
            where = "WHERE id = ? AND owner = ? AND used > ?"
            db.execute(f"UPDATE responses SET used = ? {where}", now, *mine)
            rows = db.rows(f"SELECT {_COLUMNS} FROM responses {where}", *mine)
            if not rows:
                return None
            changed = change(_record(rows[0]))
            size = len(changed.response) + len(changed.input) + ROW_BYTES
            db.execute(
                "UPDATE responses SET response = ?, input = ?, size = ? WHERE id = ?",
                changed.response,
                changed.input,
                size,
                ident,
            )
            self._untrimmed += size
            return changed

        return await self._database.run(work)

    async def delete(self, ident: str, owner: str) -> bool:
        """Forgets a response and its events; whether there was one."""

        def work(db: Database) -> bool:
            gone = db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", ident, owner)
            if gone.rowcount:
                db.execute("DELETE FROM response_events WHERE id = ?", ident)
            return bool(gone.rowcount)

        return await self._database.run(work)

    async def cancel(self, ident: str, owner: str) -> None:
        """Asks the process that makes a response to stop."""

        def work(db: Database) -> None:
            db.execute(
                "UPDATE responses SET cancelled = 1 WHERE id = ? AND owner = ? AND running = 1",
                ident,
                owner,
            )

        await self._database.run(work)

    async def heartbeat(
        self, ident: str, events: Sequence[tuple[int, bytes]], *, last: bool = False
    ) -> bool:
        """Adds events of a running response and says that it is alive; False if it shall stop (or
        was deleted). Its `last` ones are added although it shall stop."""
        now = self._clock()
        size = sum(len(event) for _, event in events)

        def work(db: Database) -> bool:
            num_changed = db.execute(
                "UPDATE responses SET beat = ?, size = size + ? WHERE id = ? AND cancelled <= ?",
                now,
                size,
                ident,
                int(last),
            )
            if num_changed.rowcount:
                for number, event in events:
                    db.execute(
                        "INSERT INTO response_events VALUES (?, ?, ?) ON CONFLICT (id, number) "
                        "DO NOTHING",
                        ident,
                        number,
                        event,
                    )
            return bool(num_changed.rowcount)

        return await self._database.run(work)

    async def events(self, ident: str, *, after: int, limit: int = 512) -> list[tuple[int, bytes]]:
        """Events with numbers above `after`, in order."""

        def work(db: Database) -> list[tuple[int, bytes]]:
            rows = db.rows(
                "SELECT number, event FROM response_events WHERE id = ? AND number > ? ORDER "
                "BY number LIMIT ?",
                ident,
                after,
                limit,
            )
            return [(int(number), bytes(event)) for number, event in rows]

        return await self._database.run(work)

    async def num_events(self, ident: str) -> int:
        """How many events a response has: the number of its next one."""

        def work(db: Database) -> int:
            most = "SELECT COALESCE(MAX(number), -1) FROM response_events WHERE id = ?"
            ((number,),) = db.rows(most, ident)
            return int(number) + 1

        return await self._database.run(work)

    def _trim(self, db: Database, owner: str, now: float) -> None:
        """Deletes what expired, then what was used longest ago until the bounds hold."""
        self._delete(db, "used <= ?", now - self._ttl_s)
        for most, where, values in (
            (self._max_bytes // 2, "owner = ?", (owner,)),
            (self._max_bytes, "1 = 1", ()),
        ):
            ((held,),) = db.rows(
                f"SELECT COALESCE(SUM(size), 0) FROM responses WHERE {where}", *values
            )
            over = int(held) - most
            if over <= 0:
                continue
            last = now
            for used, size in db.rows(
                f"SELECT used, size FROM responses WHERE {where} ORDER BY used", *values
            ):
                over -= int(size)
                last = used
                if over <= 0:
                    break
            self._delete(db, f"used <= ? AND {where}", last, *values)

    def _delete(self, db: Database, where: str, *values: object) -> None:
        chosen = f"SELECT id FROM responses WHERE {where}"
        db.execute(f"DELETE FROM response_events WHERE id IN ({chosen})", *values)
        db.execute(f"DELETE FROM responses WHERE {where}", *values)


def _record(row: Sequence[Any]) -> Record:
    ident, owner, previous, response, own_input, running, heartbeat, cancelled = row
    return Record(
        id=str(ident),
        owner=str(owner),
        previous=None if previous is None else str(previous),
        response=bytes(response),
        input=bytes(own_input),
        running=bool(running),
        heartbeat_s=float(heartbeat),
        cancelled=bool(cancelled),
    )
