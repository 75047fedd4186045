"""Where a command finds a running server, and how it asks there: over TCP, TLS or a Unix socket."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.base.errors import ConfigError, HeadraceError

TIMEOUT_S = 3600.0
FORMS = "PORT, HOST:PORT, unix:FILE or https://HOST:PORT"


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """`address`: one of FORMS, or http://HOST:PORT. `ca_file`: certificates (PEM) of the
    authorities that are trusted over TLS; None: the system's."""

    address: str
    ca_file: str | None = None

    def ask(
        self, method: str, path: str, body: dict[str, object], *, key: str | None
    ) -> tuple[int, dict[str, object]]:
        """The status and the answer; HeadraceError if nobody answers there, or nobody trusted."""
        connection = self._connection()
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        try:
            data = json.dumps(body) if method == "POST" else None
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except ssl.SSLCertVerificationError as error:
            raise HeadraceError(
                f"the certificate of {self.address} is not trusted: {error.verify_message}; "
                "--ca-file names that of its authority"
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise HeadraceError(f"no answer from {self.address}: {error}") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        is_tls = self.address.startswith("https://")
        if self.ca_file is not None and not is_tls:
            raise ConfigError(
                f"--ca-file {self.ca_file}: {self.address!r:.200} is not asked over TLS; --address "
                "https://HOST:PORT is",
                field="ca_file",
            )
        if self.address.startswith("unix:"):
            return _UnixConnection(self.address.removeprefix("unix:"))
        host, port = self._host_and_port()
        if not is_tls:
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        context = _trusting(self.ca_file)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)

    def _host_and_port(self) -> tuple[str, int | None]:
        """The port is None where a URL leaves it to its scheme."""
        is_url = "://" in self.address
        place = f":{self.address}" if self.address.isdecimal() else self.address
        url = urlsplit(place if is_url else f"http://{place}")
        try:
            port = url.port
        except ValueError:
            raise self._wrong() from None
        if url.scheme not in ("http", "https") or url.path.strip("/") or url.query or url.username:
            raise self._wrong()
        if port is None and not is_url:
            raise self._wrong()
        return url.hostname or "127.0.0.1", port

    def _wrong(self) -> ConfigError:
        message = f"--address: {self.address!r:.200} given; allowed: {FORMS}"
        return ConfigError(message, field="address")


def add_place(parser: argparse.ArgumentParser, default: str) -> None:
    """--address and --ca-file; `default` says which address is taken without the first."""
    parser.add_argument("--address", help=f"{FORMS} [{default}]")
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help="whose certificates are trusted over TLS (PEM) [the system's]",
    )


def _trusting(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--ca-file {ca_file}: {error}", field="ca_file") from None


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
