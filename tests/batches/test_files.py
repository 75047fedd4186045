"""/v1/files with the official client: whole, owner-bound, bounded, confined (P6, P9, P23, P24)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from headrace.base.errors import ConfigError
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
    answer = httpx.post(url, files=fields, headers=key, verify=NO_TLS)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_other_bodies_are_refused(bundled: Served) -> None:
    key = {"x-api-key": KEY}
    url = bundled.url + "/v1/files"
    assert httpx.post(url, json={"file": "x"}, headers=key, verify=NO_TLS).status_code == 415
    form = {**key, "content-type": "multipart/form-data; boundary=b"}
    for body in (
        b"",
        b"garbage",
        b"--b\r\n",
        b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\nx",
    ):
        assert httpx.post(url, content=body, headers=form, verify=NO_TLS).status_code == 400, body


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
