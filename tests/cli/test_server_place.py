"""Where commands find a server: each form of an address, and whom they trust over TLS."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, HeadraceError
from headrace.cli import ps
from headrace.cli.server_place import ServerPlace
from tests.front.server.http.test_tls import write_certificate


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": f"{self.path} {self.headers['authorization']}"}]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("own", "other"):
        write_certificate(folder, name)
    return folder


@pytest.fixture(scope="module", params=["http", "https"])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Models)
    if request.param == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "own.pem", folder / "own.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"{request.param}://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_with_the_first_key(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", "k1,k2")
    trusts = ["--ca-file", str(folder / "own.pem")] if url.startswith("https") else []
    addresses = [url] if trusts else [url, url.removeprefix("http://"), url.rpartition(":")[2]]
    for address in addresses:
        assert ps.main(["--address", address, *trusts]) == 0
        assert "/v1/models Bearer k1" in capsys.readouterr().out


def test_who_signs_itself_is_trusted_by_its_own_certificate_alone(url: str, folder: Path) -> None:
    if not url.startswith("https"):
        with pytest.raises(ConfigError, match=r"--ca-file .* is not asked over TLS"):
            ServerPlace(address=url, ca_file=str(folder / "own.pem")).ask("GET", "/", {}, key=None)
        return
    for ca_file in (None, str(folder / "other.pem")):
        with pytest.raises(HeadraceError, match=r"is not trusted: .*--ca-file"):
            ServerPlace(address=url, ca_file=ca_file).ask("GET", "/", {}, key=None)
    for ca_file in (folder / "none.pem", folder / "own.key"):
        with pytest.raises(ConfigError, match="--ca-file "):
            ServerPlace(address=url, ca_file=str(ca_file)).ask("GET", "/", {}, key=None)


@pytest.mark.parametrize(
    "wrong",
    ["foo", "127.0.0.1:", "127.0.0.1:x", "1:²", "ftp://h:1", "https://h:1/v1", "http://u@h:1", ""],
)
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--address"):
        ServerPlace(address=wrong).ask("GET", "/", {}, key=None)
