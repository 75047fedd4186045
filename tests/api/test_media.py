"""Media that would grow when they are decoded are refused undecoded, on every route that takes parts (P10, P9)."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest

from headrace.front.server.http.limits import MAX_JSON_CONTAINERS
from tests.api.serving import Served

MIB = 1 << 20
USER = {"role": "user", "content": "Hi"}


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def png(side: int) -> bytes:
    """A grey picture of side * side pixels in a few bytes per row of zeros."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    rows = zlib.compress(bytes(min(side * (side + 1), 64 * MIB)), 9)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def wav(seconds: int) -> bytes:
    """A header that promises so much sound, and no sound."""
    size = seconds * 48_000 * 4
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 2, 48_000, 192_000, 4, 16)
    return (
        b"RIFF"
        + struct.pack("<I", min(size + 36, 2**32 - 1))
        + b"WAVE"
        + form
        + b"data"
        + struct.pack("<I", min(size, 2**32 - 1))
    )


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


PICTURE = coded(png(50_000))
URL = f"data:image/png;base64,{PICTURE}"
SVG = "data:image/svg+xml;base64," + coded(
    b"<svg xmlns='http://www.w3.org/2000/svg'>" + b"<g>" * 9999
)
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"url": SVG}},
    {"type": "input_audio", "input_audio": {"data": coded(wav(20_000)), "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + PICTURE}},
    {"type": "image_embeds", "image_embeds": PICTURE},
]  # fmt: skip


def bodies(part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same part through every route that takes messages or parts."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    chat: dict[str, Any] = {"messages": messages, "max_tokens": 2}
    claude = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
    }
    item = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    return {
        **dict.fromkeys(
            ["/v1/chat/completions", "/v1/chat/completions/render", "/invocations"], chat
        ),
        "/v1/chat/completions/batch": {"messages": [messages, messages], "max_tokens": 2},
        **{path: {"messages": messages} for path in ("/tokenize", "/v1/embeddings", "/pooling")},
        "/v1/messages": {"messages": [{"role": "user", "content": [claude]}], "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [claude]}]},
        **{path: {"input": item} for path in ("/v1/responses", "/v1/responses/input_tokens")},
        "/v1/rerank": {"query": "a", "documents": [{"content": [part]}]},
        "/score": {"text_1": {"image": URL}, "text_2": "b"},
        "/v2/embed": {"images": [URL], "input_type": "image"},
    }  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["type"])
def test_a_bomb_is_refused_before_it_is_decoded(server: Served, part: dict[str, Any]) -> None:
    (api,) = server.api_processes
    before = api.memory_info().rss
    for path, body in bodies(part).items():
        began = sum(api.cpu_times()[:2])
        answer = server.post(path, body)
        assert answer.status_code == 400, (path, answer.text)
        assert len(answer.content) < 2000, "a refusal does not repeat what was sent"
        assert sum(api.cpu_times()[:2]) - began < 2, path
    assert api.memory_info().rss - before < 40 * MIB, "the picture alone would be 2,500 MB"
    assert server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1}).is_success


CONTAINERS_OF_A_PART = 2  # {"type": ..., "image_url": {"url": ...}}


@pytest.mark.parametrize(
    "count, says",
    [
        (100_000, f"200004 objects and arrays; {MAX_JSON_CONTAINERS} are allowed"),
        (MAX_JSON_CONTAINERS // CONTAINERS_OF_A_PART - 8, "maximum context length is 2048 tokens"),
    ],
)
def test_many_parts_are_refused_before_one_is_read(server: Served, count: int, says: str) -> None:
    """T9: 10^5 pictures are refused before an object is made of one; as many as a body may hold are too much text."""
    (api,) = server.api_processes
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    before = api.memory_info().rss
    content = [part] * count
    answer = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert api.memory_info().rss - before < 128 * MIB, "the JSON alone is 50 MB of objects"
