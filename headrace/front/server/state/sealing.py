"""Texts that leave the server and come back untouched: sealed (encrypted and authenticated) or
signed.

Reasoning goes to clients this way, so that they can return it with the next turn. A seal is bound
to its owner (the tenant of the API key) and to its purpose: what another key brings, what was
altered and what another server made is not opened; that is never an error, the text is just not
ours. AES-GCM with a random 96-bit nonce (NIST SP 800-38D) and HMAC-SHA256; both keys are derived
from one secret."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path

SECRET_BYTES = 32


MAX_SEALED_CHARS = 8 << 20


_NONCE_BYTES = 12


_SEALED, _SIGNED = "hrs1.", "hrm1."


class Sealer:
    """Seals, opens and signs with one secret."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == SECRET_BYTES, f"a secret has {SECRET_BYTES} bytes, not {len(secret)}"
        self._seal_key = hmac.digest(secret, b"headrace seal", "sha256")
        self._sign_key = hmac.digest(secret, b"headrace sign", "sha256")

    def seal(self, text: str, *, owner: str, purpose: str) -> str:
        """`text`, readable only to `open` with the same owner and purpose."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(_NONCE_BYTES)
        sealed = AESGCM(self._seal_key).encrypt(nonce, text.encode(), _bound(owner, purpose))
        return _SEALED + base64.urlsafe_b64encode(nonce + sealed).decode()

    def open(self, sealed: str, *, owner: str, purpose: str) -> str | None:
        """The text of a seal; None if it is not one of ours for this owner and purpose."""
        if not sealed.startswith(_SEALED) or len(sealed) > MAX_SEALED_CHARS:
            return None
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            data = base64.b64decode(sealed.removeprefix(_SEALED), b"-_", validate=True)
            if base64.urlsafe_b64encode(data).decode() != sealed.removeprefix(_SEALED):
                return None  # padding bits were altered
            nonce, body = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            text = AESGCM(self._seal_key).decrypt(nonce, body, _bound(owner, purpose))
        except (binascii.Error, ValueError, InvalidTag):
            return None
        return text.decode()

    def sign(self, text: str, *, owner: str, purpose: str) -> str:
        """A signature of `text`, for a text that goes along in the clear."""
        digest = hmac.digest(self._sign_key, _bound(owner, purpose) + text.encode(), "sha256")
        return _SIGNED + base64.urlsafe_b64encode(digest).decode()

    def signed(self, text: str, signature: str, *, owner: str, purpose: str) -> bool:
        """Whether `signature` is ours for this text, owner and purpose."""
        return hmac.compare_digest(
            self.sign(text, owner=owner, purpose=purpose).encode(), signature.encode()
        )


def _bound(owner: str, purpose: str) -> bytes:
    return hashlib.sha256(f"{purpose}\0{owner}\0".encode()).digest()


def secret_in(path: Path) -> bytes:
    """The secret kept in this file (0600), made by whoever comes first; the same for all processes
    that name it."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    if not path.exists():
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        try:
            os.link(fresh, path)  # complete or not there; an existing one stays
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    secret = path.read_bytes()
    assert len(secret) == SECRET_BYTES, f"{path.name} is damaged: {len(secret)} bytes"
    return secret
