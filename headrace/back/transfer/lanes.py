"""Threads that carry pieces of the KV cache, each through a host buffer of its own that is kept.

New memory for each piece would cost a page fault for every 4 KiB of it, and a device copies to and
from pageable memory at a few GB/s; checksums and files take a core each. So pieces go side by side:
while one is copied from the device, another's checksum is made, and a third is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TypeVar

import torch

from headrace.back.platforms.cpu import usable_cores

MAX_LANES = 4
"""Side by side. On the device each holds a piece twice while it gathers it."""
T = TypeVar("T")


class Lane:
    """A stream of the device, and a buffer on the host: pinned where there is a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Of so many bytes, uint8, with whatever the last piece left there."""
        if len(self._buffer) < num_bytes:
            pinned = self._stream is not None
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:num_bytes]

    def copy_out(self, content: torch.Tensor) -> torch.Tensor:
        """Bytes [blocks, bytes] on the host: of a device in the buffer, once it has settled."""
        if self._stream is None:
            return content.view(-1)
        return self.buffer(content.numel()).copy_(content.view(-1), non_blocking=True)

    def copy_in(self, content: torch.Tensor) -> torch.Tensor:
        """Bytes of the buffer, on the device."""
        return content.to(self._device, non_blocking=True)

    def settle(self) -> None:
        """Waits for what this lane has asked of the device."""
        if self._stream is not None:
            self._stream.synchronize()

    def use(self, behind: torch.cuda.Event | None) -> ExitStack:
        """What this thread does is done on the lane's stream, behind an event."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        if self._stream is not None:
            if behind is not None:
                self._stream.wait_event(behind)
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack


class Lanes:
    """The lanes of one rank: as many as it has cores, at most MAX_LANES."""

    def __init__(self, device: torch.device) -> None:
        count = min(MAX_LANES, usable_cores())
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(count):
            self._free.put(Lane(device))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-kv")

    def carry(
        self, carries: Sequence[Callable[[Lane], T]], behind: torch.cuda.Event | None
    ) -> list[T]:
        """What each piece came to, in order. Raises the first error once all have ended: nothing
        is copied any more when this returns."""
        futures = [self._pool.submit(self._one, carry, behind) for carry in carries]
        wait(futures)
        return [future.result() for future in futures]

    def _one(self, carry: Callable[[Lane], T], behind: torch.cuda.Event | None) -> T:
        lane = self._free.get()
        try:
            with lane.use(behind):
                try:
                    return carry(lane)
                finally:
                    lane.settle()
        finally:
            self._free.put(lane)
