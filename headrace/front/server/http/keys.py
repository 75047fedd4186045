"""The API keys that open this server: those of the options, and those of a file that is read again
when it changes, so that keys come and go without a restart.

The file holds a key a line; empty lines and lines that begin with # count for nothing. It is looked
at once a second, away from requests: what they see is a tuple of digests that is replaced whole. A
file that cannot be read, or holds what no key may be, leaves the keys as they were and is logged;
an empty one takes all its keys away. What a key has begun goes on when the key is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from headrace.base.config.api_keys import read_keys
from headrace.base.config.resolved import ServerSpec
from headrace.base.errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 1.0

Signature = tuple[int, int, int]


class ApiKeys:
    """The digests of the keys that are good now. `required`: whether requests must show one, which
    does not change, even where no key is left."""

    def __init__(self, spec: ServerSpec) -> None:
        self._fixed = spec.api_key_digests
        self._admin = spec.admin_key_digest
        self._path = None if spec.api_key_file is None else Path(spec.api_key_file)
        self._signature: Signature | None = None
        self.required = bool(self._fixed) or self._path is not None
        self.digests = self._fixed
        if self._path is not None:
            self.look()

    def look(self) -> None:
        """Takes the file's keys if it is another than at the last look."""
        assert self._path is not None
        signature = _signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            digests = read_keys(self._path)
        except ConfigError as error:
            log.error("%s; the API keys stay as they were", error)
            return
        if self._admin in digests:
            log.error("--api-key-file %s: the admin key is left out of the API keys", self._path)
        before = len(self.digests)
        known = dict.fromkeys((*self._fixed, *digests))
        self.digests = tuple(digest for digest in known if digest != self._admin)
        log.info("API keys: %d, %d before", len(self.digests), before)

    async def watch(self) -> None:
        """Looks at the file for ever; returns at once where there is none."""
        while self._path is not None:
            await asyncio.sleep(POLL_S)
            self.look()


def _signature(path: Path) -> Signature | None:
    """What differs where a file was written or replaced; None where there is none."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
