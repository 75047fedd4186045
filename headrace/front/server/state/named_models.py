"""Names that a client gives to a served model with prompts and options of its own: bounded in
number and bytes, owner-bound, there after a restart.

They lie in the database of the stored responses. Nothing of them expires: they are as small as
they are few, and go when their owner says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.errors import Conflict, TooLarge
from headrace.front.server.state.database import Database

MAX_NAMES = 256
"""Of one owner."""
MAX_BYTES = 1 << 20
_TABLE = """CREATE TABLE IF NOT EXISTS named_models (
    owner TEXT NOT NULL, name TEXT NOT NULL, changed DOUBLE PRECISION NOT NULL, document {bytes} NOT NULL,
    PRIMARY KEY (owner, name))"""


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name for the served model `base`. `parameters`: options of requests that say nothing of
    them; `messages`: what every conversation begins with; `changed_at`: a Unix time."""

    name: str
    base: str
    system: str = ""
    template: str = ""
    license: tuple[str, ...] = ()
    parameters: dict[str, Any] = {}
    messages: tuple[dict[str, Any], ...] = ()
    changed_at: float = 0.0


class NamedModelStore:
    """See the module. Every method is one transaction off the event loop."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def put(self, model: NamedModel, owner: str) -> None:
        """Keeps a name, also in place of what it stood for; TooLarge and Conflict beyond the
        bounds."""
        now = self._clock()
        document = msgspec.json.encode(msgspec.structs.replace(model, changed_at=now))
        if len(document) > MAX_BYTES:
            raise TooLarge(
                f"model: {len(document)} bytes of prompts and options; {MAX_BYTES} are allowed",
                field="model",
            )

        def work(db: Database) -> None:
            _prepare(db)
            ((count,),) = db.rows(
                "SELECT COUNT(*) FROM named_models WHERE owner = ? AND name <> ?", owner, model.name
            )
            if int(count) >= MAX_NAMES:
                raise Conflict(
                    f"model: there are {count} names already, {MAX_NAMES} are allowed; delete some",
                    field="model",
                )
            db.execute(
                "INSERT INTO named_models VALUES (?, ?, ?, ?) ON CONFLICT (owner, name) DO "
                "UPDATE SET changed = excluded.changed, document = excluded.document",
                owner,
                model.name,
                now,
                document,
            )

        await self._database.run(work)

    async def get(self, name: str, owner: str) -> NamedModel | None:
        """What this owner calls so."""

        def work(db: Database) -> list[Any]:
            _prepare(db)
            return db.rows(
                "SELECT document FROM named_models WHERE owner = ? AND name = ?", owner, name
            )

        rows = await self._database.run(work)
        return _decoded(rows[0][0]) if rows else None

    async def all(self, owner: str) -> list[NamedModel]:
        """All of this owner's, the newest first."""

        def work(db: Database) -> list[Any]:
            _prepare(db)
            return db.rows(
                "SELECT document FROM named_models WHERE owner = ? ORDER BY changed DESC, name",
                owner,
            )

        return [_decoded(row[0]) for row in await self._database.run(work)]

    async def delete(self, name: str, owner: str) -> bool:
        """Forgets a name; whether there was one."""

        def work(db: Database) -> bool:
            _prepare(db)
            gone = db.execute("DELETE FROM named_models WHERE owner = ? AND name = ?", owner, name)
            return bool(gone.rowcount)

        return await self._database.run(work)


def _prepare(db: Database) -> None:
    db.execute(_TABLE.format(bytes="BYTEA" if db.is_postgres else "BLOB"))


def _decoded(document: Any) -> NamedModel:
    return msgspec.json.decode(bytes(document), type=NamedModel)
