"""The store of files: a folder of our own, owner-bound, bounded in bytes and number, surviving
restarts.

A file is `ID.data` with `ID.json` beside it; the second is written last and by renaming, so that a
file is there whole or not at all. Ids are made here and checked before they become part of a path;
names that clients give are only stored. Several processes may share the folder."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.base.errors import ConfigError, InvalidRequest, NotFound, StorageFull, TooLarge

MAX_FILES = 10_000


STALE_UPLOAD_S = 3600.0
FULL_RETRY_S = 60.0


log = logging.getLogger(__name__)


_ID = re.compile(r"file-[0-9a-f]{32}\Z")


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file; times in seconds of the epoch."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int = 0
    created_at: int
    expires_at: int | None = None

    @property
    def expired(self) -> bool:
        """Whether it is to be forgotten."""
        return self.expires_at is not None and time.time() >= self.expires_at


def private_folder(path: Path, *, named: str = "--file-store") -> Path:
    """The folder, made with mode 0700; ConfigError, with the option that `named` it, if it is not
    ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{named}: cannot make {path}: {error.strerror}", field="file_store"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"--file-store: {path} belongs to or can be written by others; mode 0700 is needed",
            field="file_store",
        )
    return path


def write_whole(path: Path, document: msgspec.Struct) -> None:
    """Writes a JSON document by renaming: readers see the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with room_on_disk():
            temporary.write_bytes(msgspec.json.encode(document))
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def room_on_disk() -> Iterator[None]:
    """Names a write that found no room for what it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageFull(
            "the disk on which files are kept has no room", retry_after_s=FULL_RETRY_S
        ) from None


class FileStore:
    """See the module. `max_bytes`: all files together; one owner may use half of it. Half of it,
    and of MAX_FILES, is divided among the `owners`; the rest is for whoever comes first, also for
    those whose key is gone."""

    def __init__(self, folder: Path, *, max_bytes: int, owners: Collection[str] = ("",)) -> None:
        self.max_bytes = max_bytes
        self._owners = frozenset(owners)
        self._folder = private_folder(folder)

    def upload(self, owner: str) -> Upload:
        """A file that is about to come."""
        return Upload(self, self._folder / f"upload-{secrets.token_hex(16)}.part", owner)

    def get(self, ident: str, owner: str) -> FileInfo:
        """The file of that id, if it is this owner's; NotFound otherwise."""
        if _ID.match(ident):
            info = self._read(self._folder / f"{ident}.json")
            if info is not None and info.owner == owner and not info.expired:
                return info
        raise NotFound(f"no file with the id {ident[:80]!r}", field="id")

    def open(self, info: FileInfo) -> BinaryIO:
        """Its content."""
        try:
            return (self._folder / f"{info.id}.data").open("rb")
        except FileNotFoundError:
            raise NotFound(f"no file with the id {info.id!r}", field="id") from None

    def delete(self, info: FileInfo) -> None:
        """Forgets a file."""
        (self._folder / f"{info.id}.json").unlink(missing_ok=True)
        (self._folder / f"{info.id}.data").unlink(missing_ok=True)

    def of_owner(self, owner: str) -> list[FileInfo]:
        """The owner's files, newest first."""
        mine = [info for info in self._all() if info.owner == owner and not info.expired]
        return sorted(mine, key=lambda info: (-info.created_at, info.id))

    def room(self, owner: str) -> int:
        """Bytes that this owner may still store. What has expired, and what no upload will finish,
        is removed first."""
        numbers, sizes = Counter[str](), Counter[str]()
        for info in self._all():
            if info.expired:
                self.delete(info)
                continue
            numbers[info.owner] += 1
            sizes[info.owner] += info.bytes
        for part in self._folder.glob("*.part"):
            with suppress(FileNotFoundError):  # its upload has ended meanwhile
                if time.time() - part.stat().st_mtime > STALE_UPLOAD_S:
                    part.unlink()
        if not self._left(MAX_FILES, numbers, owner):
            return 0
        return min(
            self._left(self.max_bytes, sizes, owner), max(0, self.max_bytes // 2 - sizes[owner])
        )

    def _left(self, most: int, used: Counter[str], owner: str) -> int:
        """What is left of `most` for an owner: of its own part, and of what is everybody's."""
        part = most // 2 // max(1, len(self._owners))
        parts = dict.fromkeys(self._owners, part)
        beyond = sum(max(0, amount - parts.get(one, 0)) for one, amount in used.items())
        common = most - part * len(self._owners) - beyond
        return max(0, parts.get(owner, 0) - used[owner]) + max(0, common)

    def has(self, ident: str) -> bool:
        """Whether there is a file with this id of ours."""
        return (self._folder / f"{ident}.json").exists()

    def adopt(self, path: Path, info: FileInfo) -> FileInfo:
        """Takes a complete file in, from the same file system; what is known of it, now with its
        size. After a death in the middle it may be done again."""
        data = self._folder / f"{info.id}.data"
        if path.exists():
            path.replace(data)
        info = msgspec.structs.replace(info, bytes=data.stat().st_size)
        write_whole(self._folder / f"{info.id}.json", info)
        return info

    def _all(self) -> Iterator[FileInfo]:
        for entry in self._folder.glob("file-*.json"):
            info = self._read(entry)
            if info is not None:
                yield info

    def _read(self, path: Path) -> FileInfo | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=FileInfo)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            log.error("%s describes no file", path.name)
            return None


class Upload:
    """One file while it arrives; `cancel` unless `finish` was reached."""

    def __init__(self, store: FileStore, path: Path, owner: str) -> None:
        self._store = store
        self._path = path
        self._owner = owner
        self._room = store.room(owner)
        self._size = 0
        with room_on_disk():
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(number, "wb")

    def write(self, data: bytes) -> None:
        """More of it; TooLarge as soon as it does not fit, before it is written."""
        self._size += len(data)
        self._check()
        with room_on_disk():
            self._file.write(data)

    def _check(self) -> None:
        if self._size > self._room:
            raise TooLarge(
                f"file: the file store has room for {max(0, self._room)} more bytes of this key; "
                "delete files that are not needed",
                field="file",
            )

    def finish(self, *, filename: str, purpose: str, expires_s: int | None) -> FileInfo:
        """The complete file."""
        with room_on_disk():
            self._file.close()
        self._room = self._store.room(self._owner)  # other uploads may have ended meanwhile
        self._check()
        now = int(time.time())
        info = FileInfo(
            id=new_file_id(),
            owner=self._owner,
            filename=filename,
            purpose=purpose,
            created_at=now,
            expires_at=None if expires_s is None else now + expires_s,
        )
        return self._store.adopt(self._path, info)

    def cancel(self) -> None:
        """Forgets what has come."""
        with suppress(OSError):  # what is not written yet may find no room
            self._file.close()
        self._path.unlink(missing_ok=True)


def new_file_id() -> str:
    """A fresh id."""
    return "file-" + secrets.token_hex(16)


def checked_filename(name: str) -> str:
    """A name as it may be shown again; it is never part of a path."""
    if not name or len(name) > 255 or not name.isprintable():
        raise InvalidRequest(
            f"file: the name {name[:80]!r} is empty, longer than 255 characters or not printable",
            field="file",
        )
    return name
