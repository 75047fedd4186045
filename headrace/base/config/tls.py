"""Which files make the server's ports speak TLS."""

from __future__ import annotations

import msgspec


class TlsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Files (PEM) of the server's certificate with its chain, its key, and the authorities whose
    certificates clients must show; None: they show none."""

    certificate: str
    key: str
    client_authorities: str | None = None
