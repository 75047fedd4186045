"""TLS: which files go together, and certificates that change while the server runs (reliability 1.18)."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.base.config.server_options import ServerOptions
from headrace.base.config.tls import TlsSpec
from headrace.base.errors import ConfigError
from headrace.front.server.http.tls import ServerCertificates
from headrace.launch.tls import tls_spec


def write_certificate(folder: Path, name: str, *, password: bytes | None = None) -> None:
    """NAME.pem, a certificate for 127.0.0.1 that signs itself, and NAME.key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    begin = datetime.datetime(2020, 1, 1)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin.replace(year=2120))
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    form = serialization.PrivateFormat.PKCS8
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, encryption)
    )


def options(folder: Path, certificate: str, key: str, authorities: str = "") -> ServerOptions:
    return ServerOptions(
        ssl_certfile=str(folder / certificate),
        ssl_keyfile=str(folder / key),
        ssl_ca_certs=str(folder / authorities) if authorities else None,
    )


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> str:
    """The name of the server's certificate, as a client in the same memory sees it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    for _ in range(8):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not waiting
    der = ends[0].getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).subject.rfc4514_string().removeprefix("CN=")


def trusting(*, own: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if own is not None:
        context.load_cert_chain(own, own.with_suffix(".key"))
    return context


def test_handshakes_meet_the_newest_certificate_that_is_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_certificate(tmp_path, name)
    paths = tmp_path / "server.pem", tmp_path / "server.key"
    for path in paths:
        path.write_bytes((tmp_path / f"old{path.suffix}").read_bytes())
    certificates = ServerCertificates(TlsSpec(certificate=str(paths[0]), key=str(paths[1])))
    context = certificates.context
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        client = trusting()
        client.maximum_version = version
        assert shake_hands(context, client, "localhost") == "old"
    paths[0].write_bytes((tmp_path / "new.pem").read_bytes())  # its key has not come yet
    certificates.look()
    assert shake_hands(context, trusting(), None) == "old"
    paths[1].write_bytes((tmp_path / "new.key").read_bytes())
    certificates.look()
    for name in ("localhost", None):
        assert shake_hands(context, trusting(), name) == "new"
    paths[1].unlink()
    certificates.look()
    assert shake_hands(context, trusting(), None) == "new"


def test_clients_show_certificates_of_the_newest_authorities(tmp_path: Path) -> None:
    for name in ("server", "one", "two"):
        write_certificate(tmp_path, name)
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes((tmp_path / "one.pem").read_bytes())
    spec = tls_spec(options(tmp_path, "server.pem", "server.key", "authorities.pem"))
    assert spec is not None
    certificates = ServerCertificates(spec)

    def is_let_in(name: str | None) -> bool:
        own = None if name is None else tmp_path / f"{name}.pem"
        try:
            return shake_hands(certificates.context, trusting(own=own), None) == "server"
        except ssl.SSLError:
            return False

    assert [is_let_in(name) for name in ("one", "two", None)] == [True, False, False]
    authorities.write_bytes((tmp_path / "two.pem").read_bytes() + b"\n")
    certificates.look()
    assert [is_let_in(name) for name in ("one", "two", None)] == [False, True, False]


def test_files_that_cannot_be_used_are_named_at_start(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_certificate(tmp_path, name)
    write_certificate(tmp_path, "locked", password=b"secret")
    (tmp_path / "text").write_text("no certificate")
    assert tls_spec(ServerOptions()) is None
    for certificate, key, authorities, field, said in (
        ("a.pem", "b.key", "", "ssl_certfile", "key values mismatch"),
        ("nowhere", "a.key", "", "ssl_certfile", "No such file"),
        ("a.pem", "text", "", "ssl_certfile", "cannot be used"),
        ("locked.pem", "locked.key", "", "ssl_certfile", "the key is encrypted"),
        ("a.pem", "a.key", "text", "ssl_ca_certs", "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            tls_spec(options(tmp_path, certificate, key, authorities))
        assert refused.value.field == field
    for alone in ("ssl_keyfile", "ssl_ca_certs"):
        with pytest.raises(ConfigError, match="goes with --ssl-certfile"):
            tls_spec(ServerOptions(**{alone: "x"}))
    with pytest.raises(ConfigError, match="socket file"):
        tls_spec(ServerOptions(host="unix:/x", ssl_certfile="x"))
