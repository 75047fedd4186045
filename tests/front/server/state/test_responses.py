"""The store of responses over a real database: owner-bound, bounded, expiring, shared, there after a restart."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, ContextTooLong
from headrace.base.optional import available
from headrace.front.server.state.database import open_database
from headrace.front.server.state.responses import HEARTBEAT_TIMEOUT_S, Record, ResponseStore

POSTGRES = os.environ.get("HEADRACE_TEST_POSTGRES", "")


def record(ident: str, owner: str = "a", previous: str | None = None, size: int = 10) -> Record:
    return Record(
        id=ident, owner=owner, previous=previous, response=b"r" * size, input=ident.encode()
    )


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server: the one that is named, else one of our own where its programs are installed."""
    if not available("psycopg"):
        pytest.skip("psycopg is not installed")
    if POSTGRES:
        yield POSTGRES
        return
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        pytest.skip("no PostgreSQL here, and HEADRACE_TEST_POSTGRES names none")
    owner = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    if owner is not None:
        shutil.chown(folder, owner)

    def run(program: str, *words: str) -> None:
        command = [str(programs[-1].with_name(program)), "-D", str(folder / "data"), *words]
        done = subprocess.run(command, user=owner, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run("initdb", "-U", "headrace", "--auth=trust", "--no-sync")
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://headrace@/postgres?host={folder}"
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncIterator[ResponseStore]:
    where = "sqlite"
    if request.param == "postgresql":
        where = request.getfixturevalue("postgres")
    made = ResponseStore(
        open_database(where, folder=tmp_path), max_bytes=64_000, ttl_s=100, clock=clock
    )
    await made.start()
    if where != "sqlite":
        for table in ("responses", "response_events"):
            await made._database.run(lambda db, t=table: db.execute(f"DELETE FROM {t}"))
    yield made
    await made.close()


async def test_a_chain_is_read_oldest_first_and_only_by_its_owner(store: ResponseStore) -> None:
    await store.put(record("r1"))
    await store.put(record("r2", previous="r1"))
    await store.put(record("r3", previous="r2"))
    assert [r.id for r in await store.chain("r3", "a")] == ["r1", "r2", "r3"]
    assert await store.chain("r3", "b") == []
    assert await store.get("r1", "b") is None
    assert not await store.delete("r1", "b")
    await store.put(record("s1", owner="b", previous="r3"))
    assert await store.chain("s1", "b") == [], "another owner's responses are no history"


async def test_without_one_of_its_responses_a_chain_is_gone(store: ResponseStore) -> None:
    await store.put(record("r1"))
    await store.put(record("r2", previous="r1"))
    assert await store.delete("r1", "a") and not await store.delete("r1", "a")
    assert await store.chain("r2", "a") == []
    found = await store.get("r2", "a")
    assert found is not None and found.input == b"r2"


async def test_a_conversation_too_large_to_read_is_refused(store: ResponseStore) -> None:
    await store.put(record("r1", size=900))
    await store.put(record("r2", previous="r1", size=900))
    assert len(await store.chain("r2", "a", max_bytes=2000)) == 2
    with pytest.raises(ContextTooLong, match="more than 1000 bytes"):
        await store.chain("r2", "a", max_bytes=1000)
    assert len(await store.chain("r2", "a", depth=1, max_bytes=1000)) == 1


async def test_what_is_not_used_expires_and_what_is_used_does_not(
    store: ResponseStore, clock: Clock
) -> None:
    await store.put(record("r1"))
    await store.put(record("r2", previous="r1"))
    await store.put(record("alone"))
    clock.now += 60
    assert len(await store.chain("r2", "a")) == 2
    clock.now += 60
    assert await store.get("alone", "a") is None
    assert len(await store.chain("r2", "a")) == 2, "reading a chain keeps all of it"


async def test_the_oldest_go_when_an_owner_or_the_store_is_full(
    store: ResponseStore, clock: Clock
) -> None:
    for i in range(40):
        clock.now += 1
        await store.put(record(f"a{i}", size=2000))
    left = [i for i in range(40) if await store.get(f"a{i}", "a") is not None]
    assert left == list(range(left[0], 40)) and 10 <= len(left) <= 13, "half the store: 32 kB"
    for owner in ("b", "c", "d"):
        for i in range(12):
            clock.now += 1
            await store.put(record(f"{owner}{i}", owner=owner, size=2000))
    kept = {
        owner: sum([await store.get(f"{owner}{i}", owner) is not None for i in range(40)])
        for owner in "abcd"
    }
    assert sum(kept.values()) <= 26 and kept["a"] == 0 and kept["d"] == 12


async def test_events_are_followed_from_where_one_left_off(store: ResponseStore) -> None:
    await store.put(record("r1"))
    assert await store.heartbeat("r1", [(0, b"zero"), (1, b"one")])
    assert await store.heartbeat("r1", [(2, b"two")])
    assert await store.events("r1", after=0) == [(1, b"one"), (2, b"two")]
    assert await store.delete("r1", "a")
    assert await store.events("r1", after=-1) == []
    assert not await store.heartbeat("r1", []), "whoever makes a deleted response learns it"


async def test_only_its_owner_cancels_what_runs(store: ResponseStore) -> None:
    running = Record(id="r", owner="a", previous=None, response=b"{}", input=b"[]", running=True)
    await store.put(running)
    await store.cancel("r", "b")
    assert await store.heartbeat("r", [])
    await store.cancel("r", "a")
    assert not await store.heartbeat("r", [])


async def test_a_response_that_stopped_beating_is_lost(store: ResponseStore) -> None:
    await store.put(
        Record(id="r", owner="a", previous=None, response=b"{}", input=b"[]", running=True)
    )
    found = await store.get("r", "a")
    assert found is not None and found.running
    assert found.lost, f"its clock stands {HEARTBEAT_TIMEOUT_S} s and more in the past"


async def test_it_is_there_after_a_restart_and_private(tmp_path: Path) -> None:
    first = ResponseStore(open_database("sqlite", folder=tmp_path), max_bytes=10**6, ttl_s=100)
    secret = await first.start()
    await first.put(record("r1"))
    await first.close()
    second = ResponseStore(open_database("sqlite", folder=tmp_path), max_bytes=10**6, ttl_s=100)
    assert await second.start() == secret, "what was sealed before can still be opened"
    assert await second.get("r1", "a") is not None
    await second.close()
    assert stat.S_IMODE((tmp_path / "responses.sqlite3").stat().st_mode) == 0o600


async def test_several_processes_write_at_the_same_time(tmp_path: Path) -> None:
    stores = [
        ResponseStore(open_database("sqlite", folder=tmp_path), max_bytes=10**8, ttl_s=100)
        for _ in range(4)
    ]
    secrets = {await store.start() for store in stores}
    assert len(secrets) == 1
    writes = [store.put(record(f"{i}-{n}")) for i, store in enumerate(stores) for n in range(25)]
    await asyncio.gather(*writes)
    for i in range(4):
        for n in range(25):
            assert await stores[(i + 1) % 4].get(f"{i}-{n}", "a") is not None
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_file_that_cannot_be_opened_is_told_at_the_start() -> None:
    store = ResponseStore(
        open_database("sqlite:/proc/none/x", folder=Path("/")), max_bytes=1, ttl_s=1
    )
    with pytest.raises(ConfigError, match="--response-store"):
        await store.start()
    await store.close()
