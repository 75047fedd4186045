"""The certificate of the gRPC port, which is HTTP's: read again for the handshake after a
change."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from headrace.base.config.tls import TlsSpec
from headrace.base.errors import ConfigError
from headrace.front.server.http.tls import file_signature
from headrace.launch.tls import server_context

log = logging.getLogger(__name__)


class GrpcCertificates:
    """What gRPC asks before each handshake."""

    def __init__(self, spec: TlsSpec) -> None:
        self._spec = spec
        self._signature = file_signature(spec)

    def read(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold."""
        spec = self._spec
        authorities = spec.client_authorities
        return grpc.ssl_server_certificate_configuration(
            [(Path(spec.key).read_bytes(), Path(spec.certificate).read_bytes())],
            root_certificates=None if authorities is None else Path(authorities).read_bytes(),
        )

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold, if they are others than before and can be used."""
        signature = file_signature(self._spec)
        if signature == self._signature:
            return None
        self._signature = signature
        try:
            server_context(self._spec)
            return self.read()
        except (ConfigError, OSError) as error:
            log.error("%s; the certificate of gRPC stays as it was", error)
            return None
