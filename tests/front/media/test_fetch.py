"""What may be fetched, and from where: a canary on loopback is never reached unless its network is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.media.fetch import (
    AllowedHosts,
    Fetcher,
    FetchLimits,
    is_public,
    read_local,
)

FIELD = "messages[0].content[1].image_url.url"


class Canary:
    """An HTTP server on loopback that counts its connections and answers what it was told to."""

    def __init__(self) -> None:
        self.hits = 0
        self.hosts: list[str] = []
        self.answers: dict[str, bytes] = {}

    async def start(self) -> None:
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        lines = head.lower().split("\r\n")
        self.hosts += [line[6:] for line in lines if line.startswith("host: ")]
        writer.write(self.answers.get(path, ok(b"content")))
        if path == "/slow":
            await self._over.wait()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def stop(self) -> None:
        self._over.set()
        self._server.close()
        await asyncio.gather(*self._tasks)


def ok(body: bytes, **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{lines}\r\n"
    return head.encode() + body


def moved(location: str) -> bytes:
    head = f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n"
    return f"{head}connection: close\r\n\r\n".encode()


@pytest.fixture
async def canary() -> AsyncIterator[Canary]:
    canary = Canary()
    await canary.start()
    yield canary
    await canary.stop()


def answering(table: dict[str, Sequence[str]]):
    """A resolver with a table: each look-up takes the next answer, the last one again and again."""
    asked: dict[str, int] = {}

    async def resolve(host: str, port: int) -> Sequence[str]:
        answers = table[host]
        number = asked.get(host, 0)
        asked[host] = number + 1
        return answers[min(number, len(answers) - 1)].split(",")

    return resolve


async def refusal(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetcher.get(url, FIELD)
    assert caught.value.field == FIELD and caught.value.message.startswith(FIELD + ": ")
    return caught.value.message


async def test_fetching_is_off_unless_hosts_are_allowed(canary: Canary) -> None:
    fetcher = Fetcher(AllowedHosts(()))
    assert "fetching is off" in await refusal(fetcher, f"http://127.0.0.1:{canary.port}/")
    assert canary.hits == 0


NOT_PUBLIC = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
    *("::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "fe80::1%1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "::7f00:1"),
)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert not AllowedHosts(["*"]).permits(address)


def test_public_addresses() -> None:
    for address in ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(address)), address


LOOPBACK = (
    *("http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://127.1:{port}/"),
    *("http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://0177.0.0.1:{port}/"),
    *("http://0x7f.0.0.1:{port}/", "http://0.0.0.0:{port}/", "http://0:{port}/", "http://127.0.0.1.:{port}/"),
    *("http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://[0:0:0:0:0:ffff:7f00:1]:{port}/"),
    *("http://[::]:{port}/", "http://[::%31]:{port}/", "http://[fe80::1%25lo]:{port}/", "http://LOCALHOST:{port}/"),
    *("http://good.example\\@127.0.0.1:{port}/", "http://127.0.0.1:{port}\\@good.example/"),
    *("http://good.example@127.0.0.1:{port}/", "http://good.example:80@127.0.0.1:{port}/"),
    *("http://127.0.0.1:{port}#@good.example/", "http://127.0.0.1:{port}?@good.example/"),
    *("http:127.0.0.1:{port}", "http:///127.0.0.1:{port}/", "//127.0.0.1:{port}/", "http://①②⑦.0.0.1:{port}/"),
    *("http://good.example\t@127.0.0.1:{port}/", "http://good.example%00@127.0.0.1:{port}/", "http://127。0。0。1:{port}/"),
    *("ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/", "file://127.0.0.1/etc/passwd", "unix:///run/x", ""),
    *("http://", "http://:{port}/", "http://good.example:{port}:80/", "http://[::1", "javascript:alert(1)"),
)  # fmt: skip


@pytest.mark.parametrize("hosts", ["*", "good.example"])
@pytest.mark.parametrize("url", LOOPBACK)
async def test_no_spelling_of_loopback_is_reached(canary: Canary, url: str, hosts: str) -> None:
    """P4, T4."""
    fetcher = Fetcher(AllowedHosts([hosts]))
    await refusal(fetcher, url.format(port=canary.port))
    assert canary.hits == 0


@pytest.mark.parametrize(
    "answers", ["127.0.0.1", "8.8.8.8,127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", ""]
)
async def test_what_a_name_resolves_to_must_be_public(canary: Canary, answers: str) -> None:
    fetcher = Fetcher(
        AllowedHosts(["good.example"]), resolve=answering({"good.example": [answers]})
    )
    message = await refusal(fetcher, f"http://good.example:{canary.port}/")
    assert "not on the public network" in message and "127" not in message
    assert canary.hits == 0


async def test_a_name_is_resolved_once_so_that_rebinding_changes_nothing(canary: Canary) -> None:
    """The first answer is checked and connected to; a second one is never asked for."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    fetcher = Fetcher(AllowedHosts(["good.example", "127.0.0.0/8"]), resolve=resolve)
    assert await fetcher.get(f"http://good.example:{canary.port}/a", FIELD) == b"content"
    assert asked == ["good.example"] and canary.hosts == [f"good.example:{canary.port}"]


async def test_each_redirect_is_checked_anew(canary: Canary) -> None:
    resolve = answering({"good.example": ["127.0.0.1"], "bad.example": ["127.0.0.1"]})
    fetcher = Fetcher(AllowedHosts(["good.example", "127.0.0.1/32"]), resolve=resolve)
    base = f"http://good.example:{canary.port}"
    for number, target in enumerate(
        (f"http://bad.example:{canary.port}/", "http://169.254.169.254/", "file:///etc/passwd", "http://[::1]/")
    ):  # fmt: skip
        canary.answers[f"/{number}"] = moved(target)
        await refusal(fetcher, f"{base}/{number}")
    assert canary.hits == 4
    canary.answers["/near"] = moved("/there")
    assert await fetcher.get(f"{base}/near", FIELD) == b"content"
    canary.answers["/round"] = moved("/round")
    assert "more than 3 redirects" in await refusal(fetcher, f"{base}/round")


async def test_bytes_and_seconds_are_bounded_and_answers_plain(canary: Canary) -> None:
    limits = FetchLimits(max_bytes=100, time_s=60.0)
    resolve = answering({"good.example": ["127.0.0.1"]})
    hosts = AllowedHosts(["good.example", "127.0.0.1/32"])
    fetcher = Fetcher(hosts, limits, resolve=resolve)
    hasty = Fetcher(hosts, FetchLimits(max_bytes=100, time_s=0.5), resolve=resolve)
    base = f"http://good.example:{canary.port}"
    canary.answers["/large"] = ok(bytes(101))
    assert "more than 100 bytes" in await refusal(fetcher, f"{base}/large")
    canary.answers["/endless"] = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20)
    assert "more than 100 bytes" in await refusal(fetcher, f"{base}/endless")
    canary.answers["/slow"] = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n"
    assert "no answer within 0.5 s" in await refusal(hasty, f"{base}/slow")
    canary.answers["/gzip"] = ok(b"\x1f\x8b", content_encoding="gzip")
    assert "compressed" in await refusal(fetcher, f"{base}/gzip")
    canary.answers["/none"] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    assert "the host answers 404" in await refusal(fetcher, f"{base}/none")
    canary.answers["/noise"] = b"\x00\x01\x02\r\n\r\n"
    assert "cannot be fetched" in await refusal(fetcher, f"{base}/noise")


def test_names_on_the_list() -> None:
    hosts = AllowedHosts(["cdn.example", ".media.example", "*.img.example", "10.1.0.0/16"])
    for host in ("cdn.example", "CDN.example.", "a.media.example", "b.img.example", "10.1.2.3"):
        assert hosts.names(host), host
    for host in ("example", "xcdn.example", "media.example", "badmedia.example", "10.2.0.1"):
        assert not hosts.names(host), host
    assert hosts.permits("10.1.9.9") and not hosts.permits("10.2.0.1")


def test_local_files_lie_below_the_root(tmp_path: Path) -> None:
    root, beside = tmp_path / "media", tmp_path / "media2"
    for folder in (root, beside):
        folder.mkdir()
        (folder / "a b.png").write_bytes(b"here")
    (root / "link").symlink_to(beside / "a b.png")
    assert read_local(f"file://{root}/a%20b.png", str(root), 100, FIELD) == b"here"
    assert read_local(f"file://localhost{root}/a b.png", str(root), 100, FIELD) == b"here"
    refused = set()
    for url in (
        f"file://{root}/link", f"file://{root}/../media2/a%20b.png", f"file://{beside}/a b.png", f"file://{root}",
        f"file://{root}/none.png", f"file://host{root}/a b.png", "file:///etc/passwd", f"file://{root}/%00", "file://",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            read_local(url, str(root), 100, FIELD)
        refused.add(caught.value.message)
    assert len(refused) == 1, "what lies elsewhere and what is not there look the same"
    with pytest.raises(InvalidRequest, match="more than 3 bytes"):
        read_local(f"file://{root}/a b.png", str(root), 3, FIELD)
    with pytest.raises(InvalidRequest, match="is not set"):
        read_local(f"file://{root}/a b.png", None, 100, FIELD)
