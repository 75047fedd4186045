"""KV of prompts kept in a folder, in host memory or on a disk, beyond what the cache holds and
beyond the engine's life.

A prompt is cut into chunks of CHUNK_TOKENS. A chunk that so many requests have had is copied to a
file once it is in the prefix cache, under a name that is a keyed hash of the tenant, the salt and
all tokens up to its end. A request whose prompt begins with chunks that are there, and not in the
cache, waits until they are read into blocks, if that is expected to take less time than to compute
them; by the rates measured: what hurts is not done.

Who waits holds nothing but blocks that are being filled. What cannot be read (damaged, of other
weights) is removed and computed. The file that was not used longest makes room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from headrace.base.config.resolved import KVStoreSpec
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.wire.request import EngineRequest
from headrace.base.wire.slots import KVReply, SavedConversation
from headrace.core.kv.manager import KVManager
from headrace.core.kv.prefix_copy import PrefixCopy
from headrace.core.kv_files import KVFileHook
from headrace.core.ports import AdmissionVerdict, none_computed
from headrace.core.reports import EngineView
from headrace.core.request import TOKEN_BYTES, Request
from headrace.core.slots import check_saved_form, read_saved
from headrace.core.weights import Result

log = logging.getLogger(__name__)
CHUNK_TOKENS = 256
MAX_COUNTED = 1 << 16
"""Chunks whose requests are counted; the one that was not seen longest is forgotten."""
MAX_FILES = 10_000
LOOK_AGAIN_S = 60.0
"""How often the folder is looked through, which others may write to as well."""
STALE_S = 600.0
"""A file that has been written for so long is nobody's."""
MAX_WRITES = 64
"""Chunks that wait to be written; others are when they are next used."""
KEPT_SHARE = 8
"""Copies leave one part in so many of the pool to those that run."""
MAX_READERS = 2
"""Requests whose chunks are read at a time; others compute theirs."""
FIRST_RATE = 2e9
"""Bytes a second that reading is taken to have until it is measured."""
_SUFFIX = ".hrchunk"
_KEY_BYTES = 32
_YES = AdmissionVerdict("yes")
_READING = AdmissionVerdict("not_now", "the KV of its prompt is being read from the store")


@dataclass(eq=False, slots=True)
class _Reader:
    """A request with the names of its prompt's chunks. `pending`: those that are being read."""

    wire: EngineRequest
    names: list[str]
    is_settled: bool = False
    pending: set[str] = field(default_factory=set)
    began: float = 0.0
    num_bytes: int = 0


class KVStore(KVFileHook):
    """The stored chunks of one core. See the top of the file."""

    name = "kv_store"

    def __init__(self, spec: KVStoreSpec, num_ranks: int, engine: Callable[[], EngineView]) -> None:
        super().__init__(spec.path, num_ranks, engine)
        self._spec = spec
        self._key = _key_of(self._folder)
        self._readers: dict[int, _Reader] = {}
        self._num_reading = 0
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._sizes, self._looked_at = self._stored(), time.monotonic()
        self._writing: set[str] = set()
        self._rate = FIRST_RATE

    @property
    def num_held(self) -> int:
        """See AdmissionHook."""
        return len(self._readers)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(self._sizes.values())

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        sampling = request.sampling
        whole = request.pooling or sampling.capture_layers or sampling.control_vectors
        if request.adapter or request.media or request.encoder or whole:
            return _YES
        if request.sampling.prompt_logprobs is not None:
            return _YES
        names = self._names(request)
        for name in names:
            self._seen[name] = self._seen.pop(name, 0) + 1
        while len(self._seen) > MAX_COUNTED:
            self._seen.popitem(last=False)
        if names:
            self._readers[request.id] = _Reader(request, names)
        return _YES

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook: waits for chunks that are being read."""
        reader = self._readers.get(request_id)
        if reader is None or reader.is_settled:
            return _YES
        if not reader.pending:
            reader.is_settled = True
            try:
                self._begin(reader, computed() // CHUNK_TOKENS)
            except (HeadraceError, OSError) as error:
                log.warning("stored KV was not read: %s", error)
        return _READING if reader.pending else _YES

    def finish(self, request_id: int) -> None:
        """See AdmissionHook: chunks that are wanted and cached are written."""
        reader = self._readers.pop(request_id, None)
        engine = self._engine()
        if reader is None or not engine.service.has_executor or engine.weights.blocks_resume:
            return
        request = self._request(reader.wire)
        for number, name in enumerate(reader.names):
            if len(self._writing) >= MAX_WRITES or not _has_spare(engine.kv):
                return
            is_there = name in self._sizes or name in self._writing
            if not is_there and self._seen.get(name, 0) >= self._spec.after:
                copy = self._held_chunk(request, number)
                if copy is None:
                    return  # what follows is of no use without it
                try:
                    self._write(name, number, copy)
                except (HeadraceError, OSError) as error:
                    copy.release()
                    log.warning("KV was not stored: %s", error)
                    return

    # reading

    def _begin(self, reader: _Reader, first: int) -> None:
        """Begins to read the chunks behind the `first` that are cached, as far as there are any."""
        engine = self._engine()
        count = first
        while count < len(reader.names) and self._has(reader.names[count]):
            count += 1
        names = reader.names[first:count]
        num_bytes = sum(self._sizes[name] for name in names)
        compute_s = len(names) * CHUNK_TOKENS * engine.scheduler.prefill_budget.prefill_token_s
        is_known = compute_s > 0.0
        if not names or self._num_reading >= MAX_READERS:
            return
        if is_known and num_bytes / self._rate > compute_s:
            return
        request = self._request(reader.wire)
        reader.began, reader.num_bytes = engine.clock(), num_bytes
        try:
            for number, name in enumerate(names, start=first):
                if not self._read(reader, request, number, name):
                    break
        finally:
            if reader.pending:
                reader.is_settled = False
                self._num_reading += 1

    def _has(self, name: str) -> bool:
        """Whether a chunk is there; another process may have written it since."""
        if name not in self._sizes:
            with contextlib.suppress(OSError):
                files = self._files(self._path(name))
                self._sizes[name] = sum(file.stat().st_size for file in files)
        return name in self._sizes

    def _read(self, reader: _Reader, request: Request, number: int, name: str) -> bool:
        """Has a chunk read into blocks; false where there are none for it, or no such chunk."""
        kv, path = self._engine().kv, self._path(name)
        places = _places(kv, number)
        counts = [len(each) for each in places]
        if not kv.pool.fits(counts) or not _has_spare(kv):
            return False
        try:
            saved = read_saved(path)
            check_saved_form(self._engine(), saved, num_ranks=self._num_ranks)
        except HeadraceError as error:
            self._drop(name, error)
            return False
        if saved.tokens != self._tokens(reader.wire, number) or saved.blocks != places:
            self._drop(name, ConfigError("it is not of its name"))
            return False
        copy = PrefixCopy(kv, request, 0, places, tuple(map(tuple, kv.pool.take(counts))))
        try:
            pending = self._order("load", path, copy.blocks)
        except HeadraceError:
            copy.release(forget=True)
            raise
        reader.pending.add(name)
        self._engine().weights.attend(pending, partial(self._came, reader, name, copy))
        return True

    def _came(self, reader: _Reader, name: str, copy: PrefixCopy, reply: KVReply) -> Result:
        reader.pending.discard(name)
        counts = self._engine().counters.transfers
        if reply.error is None:
            copy.adopt()
            counts.restored_tokens += CHUNK_TOKENS
            with contextlib.suppress(OSError):
                for file in self._files(self._path(name)):
                    os.utime(file)
            self._sizes[name] = self._sizes.pop(name, 0)  # the newest
        else:
            copy.release(forget=True)
            self._drop(name, ConfigError(reply.error.message))
        if not reader.pending:
            reader.is_settled = True
            self._num_reading -= 1
            seconds = max(1e-6, self._engine().clock() - reader.began)
            self._rate += 0.3 * (reader.num_bytes / seconds - self._rate)
        return {}

    # writing

    def _held_chunk(self, request: Request, number: int) -> PrefixCopy | None:
        """The chunk's blocks out of the cache; None where one of them has gone."""
        kv = self._engine().kv
        places = _places(kv, number)
        blocks: list[tuple[int, ...]] = []
        for group, wanted in enumerate(places):
            ratio = kv.ratios[group]
            cached = [kv.pool.find(group, kv.digest(request, (i + 1) * ratio - 1)) for i in wanted]
            if any(block is None for block in cached):
                return None
            blocks.append(tuple(block for block in cached if block is not None))
        for group, each in enumerate(blocks):
            kv.pool.hold(group, each)
        return PrefixCopy(kv, request, 0, places, tuple(blocks))

    def _write(self, name: str, number: int, copy: PrefixCopy) -> None:
        engine = self._engine()
        saved = SavedConversation(
            tokens=self._tokens(copy.request.wire, number),
            computed=CHUNK_TOKENS,
            block_tokens=engine.kv.block_tokens,
            groups=engine.kv.groups,
            blocks=copy.places,
            num_ranks=self._num_ranks,
        )
        header = msgspec.msgpack.encode(saved)
        num_bytes = self._num_ranks * (copy.num_bytes + len(header))
        self._make_room(num_bytes)
        pending = self._order("save", self._path(name), copy.blocks, header)
        self._writing.add(name)
        engine.weights.attend(pending, partial(self._wrote, name, num_bytes, copy))

    def _wrote(self, name: str, num_bytes: int, copy: PrefixCopy, reply: KVReply) -> Result:
        copy.release()
        self._writing.discard(name)
        if reply.error is None:
            self._sizes[name] = num_bytes
            self._engine().counters.transfers.stored_tokens += CHUNK_TOKENS
        else:
            log.warning("KV was not stored: %s", reply.error.message)
        return {}

    def _make_room(self, num_bytes: int) -> None:
        """Removes what was not used longest; ConfigError where a chunk is larger than all may
        be."""
        most, now = self._spec.max_bytes, time.monotonic()
        if now > self._looked_at + LOOK_AGAIN_S:
            self._sizes, self._looked_at = self._stored(), now
        if num_bytes > most:
            raise ConfigError(
                f"a chunk has {num_bytes} bytes, all together may have {most} (--kv-store-bytes)"
            )
        reading = {name for reader in self._readers.values() for name in reader.pending}
        total = self.num_bytes + num_bytes * (1 + len(self._writing))
        for name in [name for name in self._sizes if name not in reading]:
            if total <= most and len(self._sizes) < MAX_FILES:
                return
            total -= self._sizes[name]
            self._remove(name)

    def _drop(self, name: str, error: HeadraceError) -> None:
        log.warning("a stored chunk was removed: %s", error.message)
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._remove_files(self._path(name))

    # names

    def _names(self, wire: EngineRequest) -> list[str]:
        """Of the chunks of a prompt, one token of which is always computed."""
        name = blake2b(key=self._key, digest_size=20)
        for part in (wire.tenant.encode(), wire.cache_salt.encode(), *wire.extra_keys):
            name.update(len(part).to_bytes(4, "little") + part)
        names: list[str] = []
        for number in range((len(wire.prompt) // TOKEN_BYTES - 1) // CHUNK_TOKENS):
            name.update(self._tokens(wire, number))
            names.append(name.hexdigest())
        return names

    def _tokens(self, wire: EngineRequest, number: int) -> bytes:
        size = CHUNK_TOKENS * TOKEN_BYTES
        return wire.prompt[number * size : (number + 1) * size]

    def _stored(self) -> dict[str, int]:
        """The bytes of the chunks that are there, those first that were not used longest."""
        files: dict[str, tuple[float, int, int]] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name, suffix, rest = entry.name.partition(_SUFFIX)
                if not suffix or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                    if rest.endswith(".part"):
                        if facts.st_mtime < time.time() - STALE_S:
                            os.unlink(entry.path)
                        continue
                except FileNotFoundError:
                    continue
                _, size, count = files.get(name, (0.0, 0, 0))
                files[name] = facts.st_mtime, size + facts.st_size, count + 1
        whole = {name: each for name, each in files.items() if each[2] == self._num_ranks}
        return {name: each[1] for name, each in sorted(whole.items(), key=lambda one: one[1][0])}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"


def check_store(kv: KVManager) -> None:
    """Refuses to start where a prefix needs more than its blocks, or chunks are no whole blocks."""
    last = 1 << 20
    reason = ""
    if kv.snapshots or any(not kind.shares or kind.hit_start(last) for kind in kv.kinds):
        reason = "prefixes of this model need more than their blocks (windows, recurrent state)"
    elif any(CHUNK_TOKENS % (kv.block_tokens * ratio) for ratio in kv.ratios):
        reason = f"a chunk of {CHUNK_TOKENS} tokens is no number of whole blocks"
    if reason:
        raise ConfigError(f"--kv-store-path: {reason}", field="kv_store_path")


def _has_spare(kv: KVManager) -> bool:
    return kv.pool.num_free > kv.pool.num_usable // KEPT_SHARE


def _places(kv: KVManager, number: int) -> tuple[tuple[int, ...], ...]:
    """Of each group the places of a chunk's blocks."""
    sizes = [CHUNK_TOKENS // (kv.block_tokens * ratio) for ratio in kv.ratios]
    return tuple(tuple(range(number * size, (number + 1) * size)) for size in sizes)


def _key_of(folder: Path) -> bytes:
    """The secret behind the names in a folder, made with it: who cannot read it cannot find out by
    names what others have asked."""
    path = folder / "key"
    with contextlib.suppress(FileExistsError):
        number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with open(number, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"--kv-store-path: {str(path)!r} holds no key", field="kv_store_path")
    return key
