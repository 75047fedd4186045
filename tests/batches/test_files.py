"""/v1/files with the official client: whole, owner-bound, bounded, confined (P6, P9, P23, P24)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.types import Message

from headrace.base.errors import ConfigError, TooLarge
from headrace.front.server.batches.upload import receive_file
from headrace.front.server.state import files
from headrace.front.server.state.files import FileStore
from tests.api.serving import NO_TLS, Served
from tests.batches.conftest import KEY


def test_a_file_comes_back_as_it_was_sent(client: openai.OpenAI) -> None:
    data = bytes(range(256)) * 300
    made = client.files.create(file=("näme.bin", data), purpose="user_data")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "näme.bin", "user_data")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    assert made.id in [info.id for info in client.files.list(purpose="user_data")]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_lists_are_paged(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{i}", b"x"), purpose="evals") for i in range(5)]
    ids = [info.id for info in client.files.list(purpose="evals", limit=2)]
    assert sorted(ids) == sorted(info.id for info in made)
    for info in made:
        client.files.delete(info.id)


def test_another_key_finds_nothing(client: openai.OpenAI, other: openai.OpenAI) -> None:
    made = client.files.create(file=("a", b"secret"), purpose="user_data")
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    assert made.id not in [info.id for info in other.files.list()]
    with pytest.raises(openai.NotFoundError):
        other.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    client.files.delete(made.id)


def test_what_does_not_fit_is_refused_and_leaves_nothing(
    bundled: Served, client: openai.OpenAI
) -> None:
    """One key may use half of the 4 MiB."""
    for info in client.files.list():
        client.files.delete(info.id)
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("big", b"x" * (2 << 20) + b"y"), purpose="user_data")
    assert caught.value.status_code == 413
    whole = client.files.create(file=("fits", b"x" * (2 << 20)), purpose="user_data")
    with pytest.raises(openai.APIStatusError):
        client.files.create(file=("more", b"x"), purpose="user_data")
    client.files.delete(whole.id)
    client.files.delete(client.files.create(file=("more", b"x"), purpose="user_data").id)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"purpose": (None, "nonsense"), "file": ("a", b"x")}, 400),
        ({"purpose": (None, "batch")}, 400),
        ({"file": ("a", b"x")}, 400),
        ({"purpose": (None, "x" * 5000), "file": ("a", b"x")}, 400),
        ({"purpose": (None, "batch"), "file": ("a" * 300, b"x")}, 400),
        ({"purpose": (None, "batch"), "file": ("a", b"x"), "expires_after[seconds]": (None, "-1")}, 400),
        ({"purpose": (None, "batch"), "file": ("a", b"x"), "expires_after[seconds]": (None, "²")}, 400),
        ({"purpose": (None, "batch"), "file": ("a", b"x"), "expires_after[seconds]": (None, "00000003600999999")}, 400),
        ({"purpose": (None, "batch"), "file": ("a", b"x"), "expires_after[seconds]": (None, "1" * 4500)}, 400),
        ({"purpose": (None, "batch"), "file": ("a", b"x"), **{f"f{i}": (None, "x") for i in range(20)}}, 400),
    ],
)  # fmt: skip
def test_a_wrong_form_is_a_400(bundled: Served, fields: dict[str, object], status: int) -> None:
    url, key = bundled.url + "/v1/files", {"x-api-key": KEY}
    answer = httpx.post(url, files=fields, headers=key, verify=NO_TLS, timeout=300)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_other_bodies_are_refused(bundled: Served) -> None:
    key = {"x-api-key": KEY}
    url = bundled.url + "/v1/files"
    assert (
        httpx.post(url, json={"file": "x"}, headers=key, verify=NO_TLS, timeout=300).status_code
        == 415
    )
    form = {**key, "content-type": "multipart/form-data; boundary=b"}
    for body in (
        b"",
        b"garbage",
        b"--b\r\n",
        b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\nx",
    ):
        assert (
            httpx.post(url, content=body, headers=form, verify=NO_TLS, timeout=300).status_code
            == 400
        ), body


@pytest.mark.parametrize(
    "ident", ["../../etc/passwd", "file-..", "file-%2e%2e", "file-" + "0" * 31, "x\x00", "file-" + "A" * 32, "a\\b"]
)  # fmt: skip
def test_an_id_never_becomes_a_path(tmp_path: Path, ident: str) -> None:
    """T23."""
    store = FileStore(tmp_path / "files", max_bytes=1 << 20)
    (tmp_path / "files" / f"{ident.replace('/', '_').replace(chr(0), '_')}.json").write_text("{}")
    with pytest.raises(Exception, match="no file with the id"):
        store.get(ident, "")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """P24."""
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="--file-store"):
        FileStore(tmp_path, max_bytes=1)


def test_uploads_at_the_same_time_stay_apart(client: openai.OpenAI) -> None:
    found: dict[int, bytes] = {}

    def one(number: int) -> None:
        made = client.files.create(file=("f", b"%d" % number * 1000), purpose="user_data")
        found[number] = client.files.content(made.id).read()
        client.files.delete(made.id)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: b"%d" % i * 1000 for i in range(8)}


def test_an_upload_may_begin_while_others_end(tmp_path: Path) -> None:
    """What lies in the folder is counted while its names change."""
    store = FileStore(tmp_path / "files", max_bytes=1 << 30)

    def upload_and_delete() -> None:
        for _ in range(150):
            upload = store.upload("")
            upload.write(b"x")
            store.delete(upload.finish(filename="f", purpose="user_data", expires_s=None))

    with ThreadPoolExecutor(8) as threads:
        for ended in [threads.submit(upload_and_delete) for _ in range(8)]:
            ended.result()
    assert store.of_owner("") == []


def test_what_one_key_stores_leaves_room_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number and in bytes: half is divided among the keys, the other half is whoever's comes first."""
    monkeypatch.setattr(files, "MAX_FILES", 16)
    store = FileStore(tmp_path / "files", max_bytes=16_000, owners=("a", "b"))

    def uploads(owner: str, size: int) -> int:
        for count in range(100):
            upload = store.upload(owner)
            try:
                upload.write(b"x" * size)
                upload.finish(filename="f", purpose="user_data", expires_s=None)
            except TooLarge:
                upload.cancel()
                return count
        raise AssertionError("there is no bound")

    assert uploads("a", 10) == 12 and uploads("b", 10) == 4
    for info in (*store.of_owner("a"), *store.of_owner("b")):
        store.delete(info)
    assert uploads("a", 2000) == 4 and uploads("b", 2000) == 4
    assert uploads("whose key is gone", 1) == 0


async def test_an_upload_looks_through_the_folder_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "files", max_bytes=1 << 20)
    looked: list[int] = []
    room = store.room

    def seen(owner: str) -> int:
        looked.append(threading.get_ident())
        return room(owner)

    monkeypatch.setattr(store, "room", seen)
    body = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
    )
    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=x")]}

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    info = await receive_file(Request(scope, receive), store, "", idle_s=5)
    assert info.bytes == 3
    assert len(looked) == 2 and threading.get_ident() not in looked
