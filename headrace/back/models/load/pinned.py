"""From a file to a device's memory: each loading thread reads into pinned memory of its own while
what it read before is on its way to the device, on a stream of its own.

Reading through a memory map would fault page by page and copy once more. Conversion and cutting
happen on the device.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STAGE_BYTES = 16 << 20
"""One read; two such buffers per thread."""


class PinnedReaders:
    """Copies parts of files to a device; any number of threads at once."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._idle: list[_Stage] = []

    def copy(
        self,
        path: Path,
        offset: int,
        *,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        source: tuple[slice, ...],
        target: torch.Tensor,
    ) -> None:
        """Writes the rectangle `source` of the tensor stored at `offset` to `target`; returns once
        it is there."""
        shape, source = shape or (1,), source or (slice(0, 1),)
        rows = range(shape[0])[source[0]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, STAGE_BYTES // max(1, row_bytes))
        into = target if target.dim() else target.view(1)
        file = self._file(path)
        with self._stage(step * row_bytes, target.device) as stage:
            # its memory may have been another tensor's, which queued kernels still use
            stage.stream.wait_stream(torch.cuda.current_stream(target.device))
            for start in range(0, len(rows), step):
                count = min(step, len(rows) - start)
                raw = stage.read(file, offset + rows[start] * row_bytes, count * row_bytes)
                with torch.cuda.stream(stage.stream):
                    values = raw.to(target.device, non_blocking=True).view(dtype)
                    part = values.view(count, *shape[1:])[(slice(None), *source[1:])]
                    into[start : start + count].copy_(part, non_blocking=True)
                stage.sent()
            stage.stream.synchronize()

    def close(self) -> None:
        """Closes the files and drops the staging memory."""
        self._idle.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    @contextmanager
    def _stage(self, num_bytes: int, device: torch.device) -> Iterator[_Stage]:
        """Staging memory for one copy; made under the lock, then used again."""
        with self._lock:
            fitting = (stage for stage in self._idle if stage.num_bytes >= num_bytes)
            stage = next(fitting, None)
            if stage is None:
                stage = _Stage(max(num_bytes, STAGE_BYTES), device)
            else:
                self._idle.remove(stage)
        yield stage
        with self._lock:
            self._idle.append(stage)


class _Stage:
    """Two pinned buffers, filled in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def read(self, file: int, offset: int, count: int) -> torch.Tensor:
        """The next bytes of a file; waits until the buffer's last content has gone."""
        last = self._sent[self._turn]
        if last is not None:
            last.synchronize()
        buffer = self._buffers[self._turn][:count]
        view, done = memoryview(buffer.numpy()), 0
        while done < count:
            got = os.preadv(file, [view[done:]], offset + done)
            if got == 0:
                raise OSError(f"the file ends {count - done} bytes early")
            done += got
        return buffer

    def sent(self) -> None:
        """The buffer's content is queued for the device."""
        self._sent[self._turn] = self.stream.record_event()
        self._turn = 1 - self._turn
