"""Blocks of the KV cache to a file and back, on one rank.

A file has what the core says of the conversation (wire/slots.py), what the rank says of itself (the
forms of its caches, a fingerprint of its weights), group by group the blocks, each with what all
caches of the group have of it, and the CRC-32 of the CRC-32s of the pieces in which these are
carried side by side (lanes.py). So it does not matter how the caches lie in memory; where a block
is one range there (`--kv-layout blocks`) it is copied at once. What is not as this rank has it is
refused before a block is touched; a file whose checksum is wrong has been copied by then into
blocks that nobody has been given.

Called by a thread of its own: the blocks are held for it, so that no step writes to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import torch

from headrace.back.models.load import Origin
from headrace.back.transfer.lanes import Lane, Lanes
from headrace.back.transfer.live import held_tensors
from headrace.base.errors import Conflict, HeadraceError, InvalidRequest, to_wire
from headrace.base.wire.slots import (
    LENGTH_BYTES,
    MAGIC,
    KVOrder,
    KVReply,
    opened,
    take_header,
    take_text,
)
from headrace.base.wire.step import KVGroup

log = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
"""Copied at a time, and what a checksum is of: part of the file's format."""
WORD = torch.complex128
"""What is copied as one: the widest type there is. Blocks of 16 KB are gathered at 7 GB/s on one
core of a Xeon, with index_select and index_copy_ of bytes at 0.2 GB/s."""
SAMPLES = 64
SAMPLE_BYTES = 64
Ranges = tuple[torch.Tensor, ...]
"""Where the blocks of a group lie: uint8 [blocks, bytes] each."""
Part = tuple[Ranges, torch.Tensor]
"""Of a group, and some of its blocks, int64."""
MovePiece = Callable[[Ranges, torch.Tensor, int, Lane], bytes]
"""Moves blocks to or from a place in a file: their checksum."""
Carry = Callable[[MovePiece, int], list[bytes]]
"""Has each piece of an order moved, the first at this byte of the file: their checksums."""


class CacheMemory(Protocol):
    """The KV memory of a runner. `caches`: by number [blocks, ...]."""

    caches: tuple[torch.Tensor, ...]

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups of caches."""
        ...

    def ranges(self, group: int) -> tuple[torch.Tensor, ...]:
        """Where the blocks of a group lie: uint8 [blocks, bytes] each."""
        ...


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself. `caches`: of each cache in the file its group, type and the shape
    of a block (of recurrent state together, in bytes)."""

    rank: int
    caches: tuple[tuple[int, str, tuple[int, ...]], ...]
    weights: str
    num_bytes: int


class KVFiles:
    """The files of one loaded model. `memory`: that of the runner which runs now."""

    def __init__(self, origin: Origin | None, device: torch.device, rank: int) -> None:
        self._origin = origin
        self._device = device
        self._rank = rank
        self._lanes = Lanes(device)
        self.fingerprint = ""
        """Of the weights, once it has been asked for; whoever changes them empties it."""

    def carry_out(
        self, order: KVOrder, memory: CacheMemory, behind: torch.cuda.Event | None
    ) -> KVReply:
        """What became of an order; nothing is raised. `behind`: on a GPU, the end of the steps
        before it."""
        path = order.path if order.num_ranks == 1 else f"{order.path}.rank{self._rank}"
        try:
            move = self._save if order.action == "save" else self._load
            ((parts, facts),) = self._lanes.carry([partial(self._prepared, order, memory)], behind)
            num_bytes = move(order, path, facts, partial(self._carry, parts, behind))
            return KVReply(num_bytes=num_bytes, num_ranges=_num_ranges(parts))
        except HeadraceError as error:
            return KVReply(error=to_wire(error))
        except OSError as error:
            why = InvalidRequest(f"filename: {error.strerror or error}", field="filename")
            return KVReply(error=to_wire(why))
        except Exception as error:
            log.exception("an order about saved conversations failed")
            return KVReply(error=to_wire(error))

    def _prepared(
        self, order: KVOrder, memory: CacheMemory, _: Lane
    ) -> tuple[list[Part], RankFacts]:
        """What is copied, and what this rank says of it: read on a lane's stream."""
        parts = self._parts(order, memory)
        return parts, self._facts(order, parts, memory)

    def _facts(self, order: KVOrder, parts: Sequence[Part], memory: CacheMemory) -> RankFacts:
        caches: list[tuple[int, str, tuple[int, ...]]] = []
        for index, (group, blocks) in enumerate(zip(memory.groups, order.blocks, strict=True)):
            if blocks and group.kind == "state":
                caches.append((index, str(torch.uint8), (group.block_bytes,)))
            elif blocks:
                own = (memory.caches[cache] for cache in group.caches)
                caches += [(index, str(cache.dtype), tuple(cache.shape[1:])) for cache in own]
        return RankFacts(
            rank=self._rank,
            caches=tuple(caches),
            weights=self._weights(),
            num_bytes=sum(len(blocks) * _block_bytes(ranges) for ranges, blocks in parts),
        )

    def _weights(self) -> str:
        if not self.fingerprint:
            self.fingerprint = fingerprint(self._origin)
        return self.fingerprint

    def _save(self, order: KVOrder, path: str, own: RankFacts, carry: Carry) -> int:
        facts = msgspec.msgpack.encode(own)
        beside = f"{path}.part"
        try:
            with open(os.open(beside, _NEW, 0o600), "wb") as file:
                file.write(MAGIC)
                for text in (order.header, facts):
                    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
                file.flush()
                begin, number = file.tell(), file.fileno()
                pieces = carry(partial(_save_piece, number), begin)
                file.seek(begin + own.num_bytes)
                file.write(_checksum(pieces))
                num_bytes = file.tell()
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        return num_bytes

    def _load(self, order: KVOrder, path: str, own: RankFacts, carry: Carry) -> int:
        with opened(path) as file:
            take_header(file)
            saved = msgspec.msgpack.decode(take_text(file), type=RankFacts)
            self._check(saved, own)
            size, begin = os.fstat(file.fileno()).st_size, file.tell()
            wanted = begin + saved.num_bytes + LENGTH_BYTES
            if size != wanted:
                raise InvalidRequest(
                    f"filename: the file has {size} bytes, {wanted} are told of", field="filename"
                )
            pieces = carry(partial(_load_piece, file.fileno()), begin)
            file.seek(begin + saved.num_bytes)
            if file.read(LENGTH_BYTES) != _checksum(pieces):
                raise InvalidRequest("filename: the file's checksum is wrong", field="filename")
        return size

    def _carry(
        self,
        parts: Sequence[Part],
        behind: torch.cuda.Event | None,
        move: MovePiece,
        begin: int,
    ) -> list[bytes]:
        """The checksums of all pieces, the first of which begins at this byte of the file."""
        carries = []
        for ranges, blocks in parts:
            for some in _pieces(ranges, blocks):
                carries.append(partial(move, ranges, some, begin))
                begin += len(some) * _block_bytes(ranges)
        return self._lanes.carry(carries, behind)

    def _check(self, saved: RankFacts, own: RankFacts) -> None:
        if saved.caches != own.caches:
            differs = next(
                ((a, b) for a, b in zip(saved.caches, own.caches, strict=False) if a != b),
                (f"{len(saved.caches)} caches", f"{len(own.caches)} caches"),
            )
            raise Conflict(
                f"filename: its KV has another form: {differs[0]} there, {differs[1]} here "
                "(group, type and block shape of a cache)"
            )
        if saved.weights != own.weights:
            raise Conflict(
                f"filename: it was saved with other weights ({saved.weights[:12]} there, "
                f"{own.weights[:12]} here), or with the same in another form"
            )

    def _parts(self, order: KVOrder, memory: CacheMemory) -> list[Part]:
        """What is copied, group by group."""
        assert len(order.blocks) == len(memory.groups), (order.blocks, memory.groups)
        return [
            (memory.ranges(group), torch.tensor(blocks, dtype=torch.int64, device=self._device))
            for group, blocks in enumerate(order.blocks)
            if blocks
        ]


_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def fingerprint(origin: Origin | None) -> str:
    """A hash of some bytes of each tensor that was made of the weights: other weights have another
    one, and so have the same ones where they are kept in another form."""
    if origin is None:
        raise Conflict("the weights of this model cannot be told, so that its KV is not saved")
    total = hashlib.sha256()
    for storage in held_tensors(origin.ledger):
        size = len(storage)
        step = max(SAMPLE_BYTES, size // SAMPLES)
        count = min(SAMPLES, size // SAMPLE_BYTES)
        total.update(size.to_bytes(8, "little"))
        if count:
            rows = torch.as_strided(storage, (count, SAMPLE_BYTES), (step, 1))
            total.update(rows.contiguous().cpu().numpy().data)
    return total.hexdigest()


def _block_bytes(ranges: Sequence[torch.Tensor]) -> int:
    return sum(one.shape[1] for one in ranges)


def _num_ranges(parts: Sequence[Part]) -> int:
    return sum(len(ranges) * len(blocks) for ranges, blocks in parts)


def _pieces(ranges: Sequence[torch.Tensor], blocks: torch.Tensor) -> Sequence[torch.Tensor]:
    return blocks.split(max(1, PIECE_BYTES // _block_bytes(ranges)))


def _save_piece(
    number: int, ranges: Ranges, blocks: torch.Tensor, offset: int, lane: Lane
) -> bytes:
    """Writes blocks to a place in a file: their checksum."""
    raw = lane.copy_out(_gathered(ranges, blocks))
    lane.settle()
    data = memoryview(raw.numpy())
    checksum = zlib.crc32(data).to_bytes(LENGTH_BYTES, "little")
    while data:
        written = os.pwrite(number, data, offset)
        data, offset = data[written:], offset + written
    return checksum


def _load_piece(
    number: int, ranges: Ranges, blocks: torch.Tensor, offset: int, lane: Lane
) -> bytes:
    """Reads blocks from a place in a file: their checksum."""
    raw = lane.buffer(len(blocks) * _block_bytes(ranges))
    left = memoryview(raw.numpy())
    while left:
        count = os.preadv(number, [left], offset)
        if not count:
            raise InvalidRequest("filename: the file ends early", field="filename")
        left, offset = left[count:], offset + count
    _scatter(ranges, blocks, lane.copy_in(raw).view(len(blocks), -1))
    return zlib.crc32(raw.numpy().data).to_bytes(LENGTH_BYTES, "little")


def _checksum(pieces: Sequence[bytes]) -> bytes:
    return zlib.crc32(b"".join(pieces)).to_bytes(LENGTH_BYTES, "little")


def _gathered(ranges: Sequence[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
    """The content of blocks, uint8 [blocks, bytes]."""
    contents = [one.view(WORD)[blocks].view(torch.uint8) for one in ranges]
    return contents[0] if len(contents) == 1 else torch.cat(contents, dim=1)


def _scatter(ranges: Sequence[torch.Tensor], blocks: torch.Tensor, content: torch.Tensor) -> None:
    """The content of blocks, to where they lie."""
    widths = [one.shape[1] for one in ranges]
    for one, part in zip(ranges, content.split(widths, dim=1), strict=True):
        one.view(WORD)[blocks] = part.contiguous().view(WORD)
