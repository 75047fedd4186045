"""Which chats are stored, in order: their documents lie among the responses, by whose bounds they
come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.front.server.state.database import Database

_TABLE = """CREATE TABLE IF NOT EXISTS stored_chats (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created DOUBLE PRECISION NOT NULL)"""
_INDEX = "CREATE INDEX IF NOT EXISTS stored_chats_by_owner ON stored_chats (owner, created, id)"


class StoredChats:
    """The order of an owner's chats. Every method is one transaction off the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, ident: str, owner: str, created: float) -> None:
        """Notes a chat whose document is stored."""

        def work(db: Database) -> None:
            _prepare(db)
            db.execute(
                "INSERT INTO stored_chats VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING",
                ident,
                owner,
                created,
            )

        await self._database.run(work)

    async def page(
        self,
        owner: str,
        *,
        oldest_first: bool,
        after: str | None,
        count: int,
        wanted: Callable[[bytes], bool],
    ) -> Sequence[bytes] | None:
        """So many documents behind `after` at most, of those that are `wanted`; None if `after` is
        none of this owner's chats."""
        order, side = ("ASC", ">") if oldest_first else ("DESC", "<")

        def work(db: Database) -> Sequence[bytes] | None:
            _prepare(db)
            db.execute(
                "DELETE FROM stored_chats WHERE owner = ? AND id NOT IN (SELECT id FROM responses)",
                owner,
            )
            place: tuple[object, ...] = ()
            if after is not None:
                rows = db.rows(
                    "SELECT created, id FROM stored_chats WHERE owner = ? AND id = ?", owner, after
                )
                if not rows:
                    return None
                place = tuple(rows[0])
            behind = f"AND (created, id) {side} (?, ?)" if place else ""
            ids = db.rows(
                f"SELECT id FROM stored_chats WHERE owner = ? {behind} "
                f"ORDER BY created {order}, id {order}",
                owner,
                *place,
            )
            documents: list[bytes] = []
            for (ident,) in ids:
                rows = db.rows("SELECT response FROM responses WHERE id = ?", ident)
                if rows and wanted(document := bytes(rows[0][0])):
                    documents.append(document)
                if len(documents) == count:
                    break
            return documents

        return await self._database.run(work)


def _prepare(db: Database) -> None:
    db.execute(_TABLE)
    db.execute(_INDEX)
