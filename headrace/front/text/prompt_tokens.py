"""Token ids of chats' prompts, kept for prompts that begin alike: a chat comes back with all that
was said before, and many chats begin with the same instructions and tools.

Control tokens are where prompts are cut, as no token spans them: what is behind one is encoded with
it in front, so that its ids are those of the whole, however a vocabulary treats the neighbours of
control tokens and the beginning of a text. A prompt is known up to each of its control tokens.
Names are keyed hashes of tenant and text: nobody's prompts are encoded faster for what another has
sent. What was not used longest goes.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter, OrderedDict
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from headrace.front.text.patterns import any_of
from headrace.front.text.tokenizer import Tokenizer

KEPT_CHARS = 8192
"""Shorter texts are encoded in about a millisecond."""
MOST_BYTES = 32 << 20
NAME_BYTES = 200
"""Of a beginning, beside the ids of its prompt."""
Ids = npt.NDArray[np.int32]


class PromptTokens:
    """The prompts of one tokenizer's chats. Thread-safe.

    `_known`: name of a beginning -> the ids of a prompt, and how many are the beginning's.
    `_names`: of how many beginnings an array of ids (by id) holds the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, most_bytes: int = MOST_BYTES) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[Ids, int]] = OrderedDict()
        self._names: Counter[int] = Counter()
        self.num_bytes = 0
        self.num_found = 0
        """Characters that were not encoded again."""

    def encode(self, rendered: str, tenant: str) -> list[int]:
        """`Tokenizer.encode_guarded`."""
        matches = [] if self._pattern is None else list(self._pattern.finditer(rendered))
        names = self._named(rendered, tenant, [match.end() for match in matches])
        at, ids = self._longest(names)
        start = matches[at].start() if at >= 0 else 0
        more = self._tokenizer.encode_guarded(rendered[start:])
        if more[:1] == ids[-1:]:  # its control token is there twice
            ids += more[1:]
            self.num_found += start
        else:  # nothing was known, or a vocabulary puts something before a first control token
            ids = more if at < 0 else self._tokenizer.encode_guarded(rendered)
        self._keep(names, ids, [self._controls[match[0]] for match in matches])
        return ids

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        return any_of(self._tokenizer.guard.tokens)

    @cached_property
    def _controls(self) -> dict[str, int | None]:
        tokens = self._tokenizer.guard.tokens
        return {token: self._tokenizer.token_id(token) for token in tokens}

    def _named(self, rendered: str, tenant: str, ends: list[int]) -> list[bytes]:
        """The names of the beginnings that end there."""
        name = blake2b(tenant.encode() + b"\0", key=self._key, digest_size=16)
        names, done = [], 0
        for end in ends:
            name.update(rendered[done:end].encode(errors="surrogatepass"))
            names.append(name.digest())
            done = end
        return names

    def _longest(self, names: list[bytes]) -> tuple[int, list[int]]:
        """The number of the longest beginning that is known, and its ids; -1: none is."""
        with self._lock:
            for at in range(len(names) - 1, -1, -1):
                known = self._known.get(names[at])
                if known is not None:
                    return at, known[0][: known[1]].tolist()
        return -1, []

    def _keep(self, names: list[bytes], ids: list[int], controls: list[int | None]) -> None:
        """Keeps a prompt; where a control token is no token of the vocabulary, it is not known
        which ids are before it, and nothing is kept."""
        kept = np.asarray(ids, np.int32)
        at = np.flatnonzero(np.isin(kept, self._control_ids))
        size = int(kept.nbytes) + NAME_BYTES * len(names)
        if not names or size > self._most_bytes or kept[at].tolist() != controls:
            return
        with self._lock:
            for name, place in zip(names, at.tolist(), strict=True):
                self._forget(name)
                self._known[name] = kept, place + 1
            self._names[id(kept)] = len(names)
            self.num_bytes += size
            while self.num_bytes > self._most_bytes:
                self._forget(next(iter(self._known)))

    @cached_property
    def _control_ids(self) -> Ids:
        known = [one for one in self._controls.values() if one is not None]
        return np.asarray(known, np.int32)

    def _forget(self, name: bytes) -> None:
        """Forgets a beginning, and with the last of its prompt the ids."""
        known = self._known.pop(name, None)
        if known is None:
            return
        self.num_bytes -= NAME_BYTES
        self._names[id(known[0])] -= 1
        if not self._names[id(known[0])]:
            del self._names[id(known[0])]
            self.num_bytes -= int(known[0].nbytes)
