"""A disk without room: a limit on the size of files, which writes run into as they do into a full disk."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.serving import Served, eventually, serving
from tests.batches.conftest import chat_line, client_of
from tests.batches.test_batches import answers, finished

pytestmark = pytest.mark.serial


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "store"
    with serving(model, "--file-store", str(folder), step_s=0.01) as running:
        yield running
        assert running.stop() == 0


@contextmanager
def full_beyond(served: Served, num_bytes: int) -> Iterator[None]:
    """No file of the server grows beyond so many bytes."""
    (api,) = served.api_processes
    before = api.rlimit(resource.RLIMIT_FSIZE)
    api.rlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield
    api.rlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_an_upload_without_room_answers_507_and_leaves_nothing(
    served: Served, tmp_path: Path
) -> None:
    with client_of(served) as client:
        with full_beyond(served, 1 << 16):
            for size in (1 << 18, (1 << 16) + 1):  # met while it comes, and at its end
                with pytest.raises(openai.APIStatusError) as full:
                    client.files.create(file=b"x" * size, purpose="user_data")
                assert full.value.status_code == 507
                assert full.value.body["code"] == "insufficient_storage"
                assert int(full.value.response.headers["retry-after"]) >= 1
            client.files.create(file=b"x" * 1000, purpose="user_data")
        assert not list((tmp_path / "store" / "files").glob("*.part"))
        made = client.files.create(file=b"x" * (1 << 18), purpose="user_data")
        assert len(client.files.content(made.id).read()) == 1 << 18


@pytest.mark.slow
def test_a_batch_without_room_pauses_with_the_reason_and_goes_on_later(
    served: Served, write_lines: Callable[[list[dict[str, Any]]], Path]
) -> None:
    """Defect: 525 generations for 164 answers."""
    count = 60
    with client_of(served) as client:
        with write_lines([chat_line(i) for i in range(count)]).open("rb") as lines:
            given = client.files.create(file=lines, purpose="batch")
        with full_beyond(served, 4096):
            batch = client.batches.create(
                input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            eventually(lambda: _paused(client, batch.id), within_s=20)
            generations = _generations(served)
            time.sleep(1.5)  # a batch that runs hot computes some hundred more
            assert _generations(served) == generations < count
            assert client.batches.retrieve(batch.id).status == "in_progress"
        ended = finished(client, batch.id)
        assert ended.status == "completed" and ended.request_counts.completed == count
        assert answers(client, ended.output_file_id).keys() == {f"r{i}" for i in range(count)}
        assert _generations(served) <= count + 16
        assert not hasattr(ended, "paused")


def _paused(client: openai.OpenAI, ident: str) -> bool:
    return "no room" in getattr(client.batches.retrieve(ident), "paused", "")


def _generations(served: Served) -> int:
    finished: dict[str, int] = served.ledger()["engines"][0]["finished"]
    return sum(finished.values())
