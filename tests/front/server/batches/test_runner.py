"""Whoever takes a batch up, and whenever: it is run once, and its counts are those of its files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.responses import Response

from headrace.base.config.server_options import ServerOptions
from headrace.front.server.batches.runner import BatchRunner
from headrace.front.server.conversation.context import LineRoute, RequestContext, Services
from headrace.front.server.ollama.named_requests import standing_for
from headrace.front.server.services import services_over
from headrace.front.server.state.batches import BatchStore, StoredBatch, new_batch_id
from headrace.front.server.state.files import FileInfo, FileStore
from headrace.launch.resolve import server_spec
from tests.front.text.vocabularies import panicking

URL = "/v1/chat/completions"
ROOM = 60_000


class Death(BaseException):
    """The process ends here."""


class DyingStore(FileStore):
    """Ends its process at the adoption of so many files from now: before it, or right after it."""

    dies_at: int | None = None
    late = False

    def adopt(self, path: Path, info: FileInfo) -> FileInfo:
        """As ever, or never."""
        if self.dies_at is None:
            return super().adopt(path, info)
        self.dies_at -= 1
        if self.dies_at < 0:
            if self.late:
                super().adopt(path, info)
            raise Death
        return super().adopt(path, info)


async def answer(context: RequestContext, body: dict[str, Any]) -> Response:
    """A body that is refused where it asks for that."""
    return Response(orjson.dumps(body), status_code=400 if body["refused"] else 200)


@pytest.fixture
async def services(connect: Any) -> AsyncIterator[Services]:
    async with connect() as (llm, _):
        services = services_over(llm, llm.tokenizer, llm.text, server_spec(ServerOptions()))
        services.line_routes = {URL: LineRoute(handler=answer, named=standing_for())}
        yield services
        services.template.close()
        services.guest_templates.close()


def begin(files: FileStore, batches: BatchStore, *, lines: int, size: int) -> StoredBatch:
    """A new batch whose lines' answers have `size` bytes and more; every tenth is refused."""
    upload = files.upload("someone")
    for i in range(lines):
        body = {"refused": i % 10 == 9, "text": "x" * size}
        line = {"custom_id": f"r{i}", "method": "POST", "url": URL, "body": body}
        upload.write(orjson.dumps(line) + b"\n")
    info = upload.finish(filename="in.jsonl", purpose="batch", expires_s=None)
    batch = StoredBatch(
        id=new_batch_id(),
        owner="someone",
        endpoint=URL,
        input_file_id=info.id,
        completion_window="24h",
        created_at=1,
        expires_at=2**40,
    )
    batches.put(batch)
    return batch


def answered(files: FileStore, batch: StoredBatch, ident: str | None) -> list[str]:
    """The lines that a file of the batch answers."""
    if ident is None:
        return []
    with files.open(files.get(ident, batch.owner)) as file:
        return [orjson.loads(line)["custom_id"] for line in file]


def check(files: FileStore, batch: StoredBatch, *, total: int) -> None:
    """The counts are those of the files, and every answer stands in them once."""
    good = answered(files, batch, batch.output_file_id)
    bad = answered(files, batch, batch.error_file_id)
    assert len({*good, *bad}) == len(good) + len(bad)
    counts = batch.counts
    assert (counts.total, counts.completed, counts.failed) == (total, len(good), len(bad))


async def test_a_batch_that_is_over_is_not_run_again(services: Services, tmp_path: Path) -> None:
    """Another process, or a list of unfinished batches read a moment ago, may still offer it."""
    files = FileStore(tmp_path / "files", max_bytes=ROOM)
    batches = BatchStore(tmp_path / "batches")
    stale = begin(files, batches, lines=100, size=100)
    await BatchRunner(services, files, batches)._one(stale)
    over = batches.get(stale.id, stale.owner)
    assert over.status == "failed" and over.errors[0].code == "batch_failed"
    check(files, over, total=100)
    assert 0 < over.counts.completed < 90
    await BatchRunner(services, files, batches)._one(stale)
    assert batches.get(stale.id, stale.owner) == over


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", [0, 1])
@pytest.mark.parametrize("max_bytes", [ROOM, 2**30])
async def test_the_answers_of_a_process_that_died_while_it_handed_them_over_are_kept(
    services: Services, tmp_path: Path, max_bytes: int, dies_at: int, late: bool
) -> None:
    files = DyingStore(tmp_path / "files", max_bytes=max_bytes)
    batches = BatchStore(tmp_path / "batches")
    batch = begin(files, batches, lines=100, size=100)
    files.dies_at, files.late = dies_at, late
    with pytest.raises(Death):
        await BatchRunner(services, files, batches)._one(batch)
    between = batches.get(batch.id, batch.owner)
    assert between.status == "finalizing"
    assert "output_file_id" not in between.shown(), "a file that may not be there yet"
    files.dies_at = None
    await BatchRunner(services, files, batches)._one(batch)
    over = batches.get(batch.id, batch.owner)
    assert over.status == ("failed" if max_bytes == ROOM else "completed")
    check(files, over, total=100)
    assert over.counts.completed and over.counts.failed


async def test_a_panic_over_one_line_is_the_answer_to_this_line(
    services: Services, tmp_path: Path
) -> None:
    """Defect: no Exception, it ended the run, which was taken up again for ever."""

    async def panics(context: RequestContext, body: dict[str, Any]) -> Response:
        if body["refused"]:
            panicking().encode("x")
        return await answer(context, body)

    services.line_routes = {URL: LineRoute(handler=panics, named=standing_for())}
    files, batches = FileStore(tmp_path / "f", max_bytes=2**30), BatchStore(tmp_path / "b")
    batch = begin(files, batches, lines=20, size=10)
    await BatchRunner(services, files, batches)._one(batch)
    over = batches.get(batch.id, batch.owner)
    assert (over.status, over.counts.completed, over.counts.failed) == ("completed", 18, 2)
    with files.open(files.get(over.error_file_id or "", batch.owner)) as file:
        assert {orjson.loads(line)["response"]["status_code"] for line in file} == {500}


async def test_a_batch_that_is_gone_is_nobodys(services: Services, tmp_path: Path) -> None:
    files = FileStore(tmp_path / "files", max_bytes=ROOM)
    batches = BatchStore(tmp_path / "batches")
    batch = begin(files, batches, lines=1, size=1)
    batches.path(batch, "json").unlink()
    await BatchRunner(services, files, batches)._one(batch)
