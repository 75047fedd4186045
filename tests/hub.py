"""A hub on this machine with two repositories, for tests that download."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 90_000,
    "tokenizer.json": b'{"a": 1}',
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"\x80\x04",
    "consolidated.safetensors": b"x" * 50,
    "onnx/model.safetensors": b"x" * 50,
    "modules.json": json.dumps(
        [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
            {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
        ]
    ).encode(),
    "config_sentence_transformers.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"x" * 50,
    "2_Dense/pytorch_model.bin": b"\x80\x04",
}


GGUFS = {
    "config.json": b"{}",
    "small-Q4_K_M.gguf": b"GGUF four" * 10,
    "small-Q8_0.gguf": b"GGUF eight" * 10,
    "small-F16-00001-of-00002.gguf": b"GGUF one" * 10,
    "small-F16-00002-of-00002.gguf": b"GGUF two" * 10,
    "mmproj-small.gguf": b"GGUF sees",
    "README.md": b"words",
}
REPOSITORIES: dict[str, dict[str, bytes]] = {"org/name": FILES, "org/ggufs": GGUFS}


class _Hub(BaseHTTPRequestHandler):
    """As much of a hub as a download needs, with ranges. `server.log` holds (method, path, range)."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.log.append((self.command, path, self.headers.get("Range")))
        repository = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        files = REPOSITORIES.get(repository, {})
        if path.startswith(f"/api/models/{repository}") and files:
            self._json(path, repository, body)
            return
        prefix = f"/{repository}/resolve/{COMMIT}/"
        data = files.get(path.removeprefix(prefix)) if path.startswith(prefix) else None
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers["Accept-Ranges"] = "bytes"
        if body and self.server.damages:
            data = data[:-1] + b"!"
        start = self._range()
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if body and self.server.cut and len(data) > self.server.cut:
            self._cut(data, headers)
            return
        self._send(206 if start else 200, data[start:], headers, body)

    def _range(self) -> int:
        value = self.headers.get("Range")
        return int(value.removeprefix("bytes=").split("-")[0]) if value else 0

    def _cut(self, data: bytes, headers: dict[str, str]) -> None:
        """Promises all, sends a part, hangs up; from now on the server is sound."""
        sent, self.server.cut = self.server.cut, 0
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:sent])
        self.wfile.flush()
        self.close_connection = True

    def _json(self, path: str, repository: str, body: bool) -> None:
        files = REPOSITORIES[repository]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        value: Any = {"id": repository, "sha": COMMIT, "siblings": siblings, "private": False}
        if "/tree/" in path:
            value = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.log, server.cut, server.damages = [], 0, False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def hub_environment(hub: Any) -> dict[str, str]:
    """The environment of a process whose hub it is."""
    return {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
