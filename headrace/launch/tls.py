"""TLS of the server's ports: which files, and the context that they make."""

from __future__ import annotations

import ssl
from pathlib import Path

from headrace.base.config.server_options import ServerOptions
from headrace.base.config.tls import TlsSpec
from headrace.base.errors import ConfigError


def tls_spec(options: ServerOptions) -> TlsSpec | None:
    """The files, which are read once to see that they go together; None without TLS."""
    if options.ssl_certfile is None:
        for flag, value in (
            ("ssl_keyfile", options.ssl_keyfile),
            ("ssl_ca_certs", options.ssl_ca_certs),
        ):
            if value is not None:
                shown = "--" + flag.replace("_", "-")
                raise ConfigError(f"{shown} {value}: goes with --ssl-certfile", field=flag)
        return None
    if options.host.startswith("unix:"):
        raise ConfigError(
            f"--ssl-certfile: --host {options.host} is a socket file, which needs no TLS",
            field="ssl_certfile",
        )
    spec = TlsSpec(
        certificate=_absolute(options.ssl_certfile),
        key=_absolute(options.ssl_keyfile or options.ssl_certfile),
        client_authorities=(
            None if options.ssl_ca_certs is None else _absolute(options.ssl_ca_certs)
        ),
    )
    server_context(spec)
    return spec


def server_context(spec: TlsSpec) -> ssl.SSLContext:
    """A context with what the files hold now: TLS 1.2 or later, HTTP/1.1. ConfigError names the
    option whose file is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(spec.certificate, spec.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {spec.certificate} with --ssl-keyfile {spec.key}: they cannot be used: "
            f"{_shown(error)}",
            field="ssl_certfile",
        ) from None
    if spec.client_authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(spec.client_authorities)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {spec.client_authorities}: it cannot be used: {_shown(error)}",
                field="ssl_ca_certs",
            ) from None
    return context


def _no_password() -> str:
    """Without this a key under a password would be asked for at the terminal."""
    raise ValueError("the key is encrypted; store it without a password, readable by its owner")


def _shown(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
