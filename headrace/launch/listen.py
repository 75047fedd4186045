"""Where a server listens: TCP ports and socket files, bound before any process is started, and how
they are shown."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from headrace.base.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; ConfigError if the address cannot be had. The host "unix:FILE" is a
    file of mode 0600."""
    if host.startswith("unix:"):
        return bind_admin(host)
    listener = _bound(host, port, socket.SO_REUSEADDR)
    listener.listen(2048)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Holds a port (of the loopback interface, beside a socket file) for processes that bind it
    together; nothing is taken from it here. A port that another server shares among its processes
    is refused: SO_REUSEPORT alone would join them."""
    host = "127.0.0.1" if host.startswith("unix:") else host
    _bound(host, port, socket.SO_REUSEADDR).close()
    return _bound(host, port, socket.SO_REUSEPORT)


def _bound(host: str, port: int, option: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio asks for the protocol before it sets TCP_NODELAY
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def bind_admin(address: str) -> socket.socket:
    """The listening socket of the admin API: "HOST:PORT", or "unix:FILE" with mode 0600."""
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        return bind(host, int(port))
    path = Path(address.removeprefix("unix:"))
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    listener.listen(64)
    return listener


def address_of(listener: socket.socket, *, scheme: str = "http://") -> str:
    """Where a socket listens, with the port that was found, as people write it."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{scheme}[{host}]:{port}" if ":" in host else f"{scheme}{host}:{port}"
