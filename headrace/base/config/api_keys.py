"""API keys as text: what a key may be, the digest it is kept as, and a file of them."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from headrace.base.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096
"""Each request is compared with all of them."""


def key_digest(key: str) -> str:
    """The form in which a key is kept: SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_key(key: str) -> bool:
    """Whether a key can be sent in a header as it is."""
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def read_keys(path: Path) -> tuple[str, ...]:
    """The digests of a file's keys; ConfigError names the line that holds none, or the limit."""
    flag = f"--api-key-file {path}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{flag}: it is no regular file", field="api_key_file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: it cannot be read: {error}", field="api_key_file") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag}: more than {MAX_FILE_BYTES} bytes", field="api_key_file")
    digests: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not is_key(key):
            raise ConfigError(
                f"{flag}: line {number} is no key (printable ASCII)", field="api_key_file"
            )
        digests.append(key_digest(key))
    if len(digests) > MAX_KEYS:
        raise ConfigError(
            f"{flag}: {len(digests)} keys, at most {MAX_KEYS} are allowed", field="api_key_file"
        )
    return tuple(dict.fromkeys(digests))
