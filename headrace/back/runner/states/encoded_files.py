"""What an encoder gave for images, video and sounds, kept in a folder that several servers see, so
that an input is encoded once: some servers encode, others answer (`--encoder-cache-path`).

A file is named by a hash of the input's key, its kind and cut, and of what the model is made of:
another one finds nothing, and once the weights of a running one are changed it keeps to itself. It
has the rows of hidden size as they go into the arena, and a CRC-32. What is damaged is removed and
encoded again. Files are written by a thread, beside the steps; the file that was not used longest
makes room.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import zlib
from collections import deque
from pathlib import Path

import msgspec
import torch

from headrace.base.config.kv_options import EncoderFilesSpec
from headrace.base.config.resolved import ModelSpec
from headrace.base.wire.media import MediaContent

log = logging.getLogger(__name__)
MAX_WAITING = 64
"""Inputs that wait to be written; others are when they are next encoded."""
SAMPLE_BYTES = 4096
SAMPLES = 64
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SUFFIX = ".hrencoded"
_CRC_BYTES = 4
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_Job = tuple[Path, torch.Tensor, torch.cuda.Event | None]


class EncodedFiles:
    """The files of a model's encoder, whose rows have `width` numbers of `dtype`."""

    def __init__(
        self, spec: EncoderFilesSpec, model: ModelSpec, width: int, dtype: torch.dtype
    ) -> None:
        self._folder, self._max_bytes = Path(spec.path), spec.max_bytes
        self._width, self._dtype = width, dtype
        identity = identity_of(model) + f"{width} {dtype}".encode()
        self._key: bytes | None = hashlib.blake2b(identity, digest_size=32).digest()
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._writes = False
        self.num_loaded = 0

    def end(self) -> None:
        """The weights are no longer those of the files: nothing is read or written from now on."""
        self._key = None

    def load(self, content: MediaContent, tokens: int) -> torch.Tensor | None:
        """The rows of an input, [M, W] on the host; None: they are not there."""
        path = self._path(content)
        if path is None or not path.exists():
            return None
        try:
            data = bytearray(path.read_bytes())
        except OSError:
            return None
        size = tokens * self._width * self._dtype.itemsize
        body, crc = memoryview(data)[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if len(body) != size or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
            log.warning("%s is damaged, its input is encoded again", path.name)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the newest
        self.num_loaded += 1
        return torch.frombuffer(body, dtype=self._dtype).view(tokens, self._width)

    def save(self, content: MediaContent, rows_MW: torch.Tensor) -> None:
        """Has the rows of an input written soon; nobody changes them any more."""
        path, event = self._path(content), None
        if path is None:
            return
        if rows_MW.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                return
            self._waiting.append((path, rows_MW, event))
            if self._writes:
                return
            self._writes = True
        threading.Thread(target=self._write_all, name="encoded-files", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether everything has been written."""
        return not self._writes

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._writes = False
                    return
                job = self._waiting.popleft()
            try:
                self._write(job)
            except (OSError, RuntimeError) as error:
                log.warning("what an encoder gave was not stored: %s", error)

    def _write(self, job: _Job) -> None:
        path, rows_MW, event = job
        if event is not None:
            event.synchronize()
        data = rows_MW.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
        if not self._make_room(len(data) + _CRC_BYTES):
            return
        beside = Path(f"{path}.{os.getpid()}.part")
        try:
            with open(os.open(beside, _NEW, 0o600), "wb") as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _make_room(self, num_bytes: int) -> bool:
        """Removes what was not used longest; false where one file is larger than all may be."""
        if num_bytes > self._max_bytes:
            return False
        files: list[tuple[float, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _SUFFIX in entry.name and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        files.append((facts.st_mtime, facts.st_size, entry.path))
        total = num_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return True

    def _path(self, content: MediaContent) -> Path | None:
        if self._key is None:
            return None
        what = msgspec.msgpack.encode((content.key, content.kind, content.grid, content.cut))
        name = hashlib.blake2b(what, key=self._key, digest_size=20).hexdigest()
        return self._folder / f"{name}{_SUFFIX}"


def identity_of(model: ModelSpec) -> bytes:
    """What tells a model from others for its encoder's outputs: how it is made, and the size and
    some bytes of each file of its weights."""
    made_of = (model.format, model.family, model.dtype, model.seed, model.config, model.image_norm)
    quantized = model.quantization, model.quantization_parts
    total = hashlib.blake2b(msgspec.json.encode((made_of, quantized)), digest_size=32)
    for place in filter(None, (model.path, model.vision_path)):
        path = Path(place)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in files:
            if file.suffix in _WEIGHTS and file.is_file():
                total.update(file.name.encode() + _sampled(file))
    return total.digest()


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    parts = [size.to_bytes(8, "little")]
    with open(file, "rb") as content:
        for number in range(SAMPLES):
            content.seek(size * number // SAMPLES)
            parts.append(content.read(SAMPLE_BYTES))
    return b"".join(parts)
