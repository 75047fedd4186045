"""How the bytes of safetensors files come into memory: through the system's file cache, past it, or
from an object store by ranged requests. A reader lists a model's files, reads their headers, and
fills memory; any number of threads may read at once.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.base.config.hf import parse_json
from headrace.base.config.safetensors_header import (
    MAX_HEADER_BYTES,
    StoredTensor,
    parse_safetensors_header,
)
from headrace.base.config.tensorizer_header import read_weights_header
from headrace.base.config.weight_files import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    SINGLE_NAME,
    WeightFiles,
    find_weight_files,
    natural_key,
    read_weight_map,
)
from headrace.base.errors import CheckpointError

if TYPE_CHECKING:
    import httpx


class Reader(Protocol):
    """Reads a model's files. `maps`: they may as well be mapped into memory."""

    maps: bool

    def files(self, folder: Path) -> WeightFiles:
        """The model's safetensors files; CheckpointError as find_weight_files."""
        ...

    def header(self, path: Path) -> dict[str, StoredTensor]:
        """The tensors of a file; CheckpointError as read_safetensors_header."""
        ...

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """Fills the target from the file; OSError if the file ends before."""
        ...

    def close(self) -> None:
        """Lets go of the files."""
        ...


class _LocalReader:
    """Files of a folder, each opened once."""

    flags = os.O_RDONLY | os.O_CLOEXEC
    maps = True

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def files(self, folder: Path) -> WeightFiles:
        return find_weight_files(folder)

    def header(self, path: Path) -> dict[str, StoredTensor]:
        return read_weights_header(path)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def file(self, path: Path) -> int:
        """Its descriptor."""
        with self._lock:
            if path not in self._open:
                self._open[path] = self.opened(path)
            return self._open[path]

    def opened(self, path: Path) -> int:
        """Opens it."""
        return os.open(path, self.flags)


class BufferedReader(_LocalReader):
    """Through the file cache, which is told to fetch what is not there yet."""

    def opened(self, path: Path) -> int:
        """See _LocalReader."""
        file = super().opened(path)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """See Reader."""
        file, done = self.file(path), 0
        while done < len(target):
            got = os.preadv(file, [target[done:]], offset + done)
            _check_end(got, len(target) - done)
            done += got


ALIGNMENT = 4096
STAGE_BYTES = 8 << 20


class DirectReader(_LocalReader):
    """Past the file cache (O_DIRECT): from a fast disk as fast as it gives, and no memory is taken
    from what the cache holds. Each thread has an aligned buffer. A file system that has no such
    reads is read through the cache."""

    maps = False

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    def opened(self, path: Path) -> int:
        """See _LocalReader."""
        try:
            return os.open(path, self.flags | os.O_DIRECT)
        except OSError:
            return super().opened(path)

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """See Reader."""
        file, stage = self.file(path), self._stage()
        done = 0
        while done < len(target):
            skip = (offset + done) % ALIGNMENT
            wanted = min(len(stage), -(-(skip + len(target) - done) // ALIGNMENT) * ALIGNMENT)
            got = os.preadv(file, [stage[:wanted]], offset + done - skip) - skip
            _check_end(got, len(target) - done)
            part = min(got, len(target) - done)
            target[done : done + part] = stage[skip : skip + part]
            done += part

    def _stage(self) -> memoryview:
        if not hasattr(self._own, "stage"):  # a thread's first read
            self._own.stage = memoryview(mmap.mmap(-1, STAGE_BYTES))
        stage: memoryview = self._own.stage
        return stage


def _check_end(got: int, left: int) -> None:
    if got <= 0:
        raise OSError(f"the file ends {left} bytes early")


PART_BYTES = 8 << 20
CONNECTIONS = 16
TRIES = 4
TIMEOUT_S = 60.0
_FILE = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class ObjectReader:
    """Objects below a URL, by ranged requests of at most PART_BYTES, CONNECTIONS at a time: an
    S3-like store, or any HTTP server that answers ranges. A request that fails on the way, or with
    a status of the server's fault, is repeated."""

    maps = False

    def __init__(self, url: str) -> None:
        import httpx  # a tenth of a second, for this reader alone

        self._url = url.rstrip("/")
        limits = httpx.Limits(max_connections=CONNECTIONS)
        self._client = httpx.Client(timeout=TIMEOUT_S, limits=limits)
        self._failure: type[Exception] = httpx.HTTPError
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="object")

    def files(self, folder: Path) -> WeightFiles:
        """See Reader: what the index beside the objects names, or model.safetensors alone."""
        answer = self._get(INDEX_NAME, {})
        if answer.status_code == 404:
            return WeightFiles(files=(folder / SINGLE_NAME,))
        where = f"{self._url}/{INDEX_NAME}"
        if answer.status_code != 200 or len(answer.content) > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{where}: status {answer.status_code}, {len(answer.content)} bytes"
            )
        weight_map = read_weight_map(parse_json(answer.content, where), where)
        names = sorted(set(weight_map.values()), key=natural_key)
        for name in names:
            if _FILE.fullmatch(name) is None:
                raise CheckpointError(f"{where}: {name!r} is not a plain file name")
        return WeightFiles(files=tuple(folder / name for name in names), weight_map=weight_map)

    def header(self, path: Path) -> dict[str, StoredTensor]:
        """See Reader."""
        where = self._url_of(path)
        try:
            first, size = self._ranged(path, 0, 8)
            length = int.from_bytes(first, "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{where}: a header of {length} bytes in an object of {size}; it is truncated"
                )
            raw, _ = self._ranged(path, 8, length)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from error
        return parse_safetensors_header(raw, path, size=size)

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """See Reader."""

        def part(start: int) -> None:
            view = target[start : start + PART_BYTES]
            view[:], _ = self._ranged(path, offset + start, len(view))

        list(self._pool.map(part, range(0, len(target), PART_BYTES)))

    def close(self) -> None:
        """See Reader."""
        self._pool.shutdown()
        self._client.close()

    def _url_of(self, path: Path) -> str:
        return f"{self._url}/{path.name}"

    def _ranged(self, path: Path, offset: int, count: int) -> tuple[bytes, int]:
        """`count` bytes, and the object's size."""
        if count == 0:
            return b"", 0
        answer = self._get(path.name, {"Range": f"bytes={offset}-{offset + count - 1}"})
        if answer.status_code != 206:
            raise OSError(f"{self._url_of(path)}: status {answer.status_code}, not 206 (a range)")
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        size = int(total[1]) if total else 0
        if len(answer.content) != count:
            missing = count - len(answer.content)
            raise OSError(f"{self._url_of(path)}: the object ends {missing} bytes early")
        return answer.content, size

    def _get(self, name: str, headers: Mapping[str, str]) -> httpx.Response:
        url = f"{self._url}/{name}"
        for attempt in range(TRIES):
            last = attempt + 1 == TRIES
            try:
                answer = self._client.get(url, headers={**headers, "Accept-Encoding": "identity"})
            except self._failure as error:
                if last:
                    raise OSError(f"{url}: {error!r}") from error
            else:
                if answer.status_code < 500 and answer.status_code != 429:
                    return answer
                if last:
                    raise OSError(f"{url}: status {answer.status_code}")
            time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")


def reader_of(kind: str, url: str | None) -> Reader:
    """The reader that a model's specification names."""
    if url is not None:
        return ObjectReader(url)
    return DirectReader() if kind == "direct" else BufferedReader()
