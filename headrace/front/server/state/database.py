"""A database as the store uses it: one connection in one thread, statements with `?` for values,
short transactions.

SQLite comes with Python; PostgreSQL needs psycopg. Both are asked the same SQL, so that what holds
for one holds for the other. Whatever the database fails with becomes an error of ours: the request
is answered, the connection made anew."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace.base.errors import ConfigError, HeadraceError, Unavailable
from headrace.base.optional import require

T = TypeVar("T")
Row = Sequence[Any]
BUSY_S = 5.0
log = logging.getLogger(__name__)


class Cursor(Protocol):
    """The part of DB-API 2.0's cursor that is used."""

    rowcount: int

    def fetchall(self) -> list[Any]:
        """All rows."""
        ...


class DatabaseConnection(Protocol):
    """The part of a connection that is used; both libraries offer `execute` on it."""

    def execute(self, statement: Any, values: Sequence[Any] = ..., /) -> Cursor:
        """Runs one statement."""
        ...

    def commit(self) -> None:
        """Ends the transaction."""
        ...

    def rollback(self) -> None:
        """Undoes it."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class Database:
    """Runs functions over the connection, one at a time, off the event loop."""

    def __init__(self, connect: Callable[[], DatabaseConnection], *, is_postgres: bool) -> None:
        self.is_postgres = is_postgres
        self._connect = connect
        self._connection: DatabaseConnection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")

    async def run(self, work: Callable[[Database], T]) -> T:
        """`work` as one transaction, in the database's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    def execute(self, statement: str, *values: Any) -> Cursor:
        """One statement within `work`."""
        assert self._connection is not None
        return self._connection.execute(
            statement.replace("?", "%s") if self.is_postgres else statement, values
        )

    def rows(self, statement: str, *values: Any) -> list[Row]:
        """The rows of one query within `work`."""
        return self.execute(statement, *values).fetchall()

    async def close(self) -> None:
        """Ends the connection and the thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._drop)
        self._thread.shutdown()

    def _transact(self, work: Callable[[Database], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._connect()
            result = work(self)
            self._connection.commit()
            return result
        except HeadraceError:
            if self._connection is not None:
                self._connection.rollback()
            raise
        except Exception as error:  # the libraries have trees of their own; each of them ends here
            log.error("the response store failed: %s: %s", type(error).__name__, error)
            self._drop()
            raise Unavailable("the response store is not available", retry_after_s=1.0) from None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def open_database(where: str, *, folder: Path) -> Database:
    """The database of a resolved option: sqlite (in `folder`), sqlite:FILE or postgresql://..."""
    if where.startswith("sqlite"):
        named = where.removeprefix("sqlite").removeprefix(":")
        path = Path(named).expanduser() if named else folder / "responses.sqlite3"
        return Database(lambda: _sqlite(path), is_postgres=False)
    return Database(lambda: _postgres(where), is_postgres=True)


def _sqlite(path: Path) -> DatabaseConnection:
    import sqlite3

    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(
            f"--response-store: {path} cannot be opened ({error.strerror}); name another file, "
            "or off",
            field="response_store",
        ) from None
    connection: Any = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    connection.execute("PRAGMA secure_delete=ON")  # what is forgotten is gone from the file too
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    opened: DatabaseConnection = connection
    return opened


def _postgres(url: str) -> DatabaseConnection:
    psycopg: Any = require("psycopg", extra="postgres", purpose="--response-store postgresql://")
    connection: DatabaseConnection = psycopg.connect(url, connect_timeout=round(BUSY_S))
    return connection
