"""What the workers are told about the KV of a conversation that goes to a file or comes from one
(back/transfer/kv_files.py carries it out), and what such a file says in front of it."""

from __future__ import annotations

import os
import stat
from typing import IO

import msgspec

from headrace.base.errors import InvalidRequest, WireError
from headrace.base.wire.step import KVGroup

FORMAT = 3
MAGIC = b"HRKVFILE"
LENGTH_BYTES = 4
MAX_HEADER_BYTES = 64 << 20


class SavedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a file.

    model         the family and the path it was served from: for people, nothing is compared
    tokens        int32 little-endian of the whole conversation; the KV of the first `computed`
                  of them is in the file
    tenant, cache_salt, extra_keys    what its prefix is kept apart by
    groups        the groups of the engine that wrote it; `blocks`: of each the numbers of its
                  blocks that are in the file, as places in the sequence
    num_ranks     workers, each of which has a file of its own
    """

    format: int = FORMAT
    model: str = ""
    tokens: bytes
    computed: int
    tenant: str = ""
    cache_salt: str = ""
    extra_keys: tuple[bytes, ...] = ()
    block_tokens: int
    groups: tuple[KVGroup, ...]
    blocks: tuple[tuple[int, ...], ...]
    num_ranks: int = 1


class KVOrder(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    """Copies blocks beside the steps, behind the steps submitted before. `action`: "save" or
    "load". `blocks`: of each group the blocks, in the file's order; of recurrent state the slots of
    snapshots. `header`: what stands in front of a file that is saved."""

    action: str
    path: str
    blocks: tuple[tuple[int, ...], ...]
    header: bytes = b""
    num_ranks: int = 1


class KVReply(msgspec.Struct, frozen=True, kw_only=True, tag="kv_moved"):
    """What became of it: bytes of this rank's file, and ranges of memory that were copied."""

    num_bytes: int = 0
    num_ranges: int = 0
    error: WireError | None = None


def opened(path: str) -> IO[bytes]:
    """The file, which must be a plain one."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = open(number, "rb")  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise InvalidRequest("filename: it is not a plain file", field="filename")
    return file


def take_header(file: IO[bytes]) -> bytes:
    """What the core says of the conversation: the first thing in a file."""
    if file.read(len(MAGIC)) != MAGIC:
        raise InvalidRequest("filename: no file of a saved conversation", field="filename")
    return take_text(file)


def take_text(file: IO[bytes]) -> bytes:
    """The next text, its length in front."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"filename: a header of {length} bytes, at most {MAX_HEADER_BYTES} are read",
            field="filename",
        )
    text = file.read(length)
    if len(text) != length:
        raise InvalidRequest("filename: the file ends in its header", field="filename")
    return text
