"""Certificates that are replaced while the server runs.

The listening sockets keep one context, which hands every handshake on to the newest: connections
that are there go on. The files are looked at once a second; what cannot be used (half of a
rotation: a certificate whose key has not come yet) leaves the old one in place and is logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl

from headrace.base.config.tls import TlsSpec
from headrace.base.errors import ConfigError
from headrace.launch.tls import server_context

POLL_S = 1.0
log = logging.getLogger(__name__)
Signature = tuple[tuple[int, int, int] | None, ...]


class ServerCertificates:
    """`context` is what listens. Sessions are not resumed: each handshake meets the newest
    certificate, and the newest authorities of clients."""

    def __init__(self, spec: TlsSpec) -> None:
        self._spec = spec
        self._signature = file_signature(spec)
        self.context = server_context(spec)
        self.context.num_tickets = 0
        self.context.options |= ssl.OP_NO_TICKET
        self._newest = self.context
        self.context.sni_callback = self._hand_on

    def look(self) -> None:
        """Takes what the files hold if they are others than at the last look."""
        signature = file_signature(self._spec)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._newest = server_context(self._spec)
        except ConfigError as error:
            log.error("%s; the certificate stays as it was", error)
            return
        log.info("the certificate was read again")

    async def watch(self) -> None:
        """Looks at the files for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.look)

    def _hand_on(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._newest


def file_signature(spec: TlsSpec) -> Signature:
    """What differs where one of the files was written or replaced."""
    paths = (spec.certificate, spec.key, spec.client_authorities)
    return tuple(None if path is None else _signature(path) for path in paths)


def _signature(path: str) -> tuple[int, int, int] | None:
    """What differs where a file was written or replaced; None where there is none."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
