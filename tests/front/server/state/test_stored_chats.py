"""Stored chats in pages: in order, by owner, without those that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.front.server.state.database import open_database
from headrace.front.server.state.responses import Record, ResponseStore


async def test_chats_come_in_pages_of_their_owner(tmp_path: Path) -> None:
    database = open_database(f"sqlite:{tmp_path / 'chats'}", folder=tmp_path)
    store = ResponseStore(database, max_bytes=1 << 20, ttl_s=1e12)
    await store.start()
    for number, owner in enumerate(["one", "two", "one", "one"]):
        name = f"chatcmpl-{number}"
        body = str(number).encode()
        await store.put(Record(id=name, owner=owner, previous=None, response=body, input=b"[]"))
        await store.chats.add(name, owner, created=5.0)

    async def page(**more: Any) -> Any:
        asked = {"oldest_first": True, "after": None, "count": 9, "wanted": lambda body: True}
        return await store.chats.page("one", **{**asked, **more})

    assert await page() == [b"0", b"2", b"3"]
    assert await page(oldest_first=False, count=2) == [b"3", b"2"]
    assert await page(after="chatcmpl-0", count=1) == [b"2"]
    assert await page(oldest_first=False, after="chatcmpl-2") == [b"0"]
    assert await page(wanted=lambda body: body != b"2") == [b"0", b"3"]
    assert await page(after="chatcmpl-1") is None
    await store.delete("chatcmpl-0", "one")
    assert await page() == [b"2", b"3"] and await page(after="chatcmpl-0") is None
    await store.close()
