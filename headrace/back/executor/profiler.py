"""A trace of one worker's steps by torch's profiler, for a person with a trace viewer. Costs
nothing while off."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.base.errors import Conflict, InvalidRequest


class Profiler:
    """Starts and stops on the thread that runs the steps: only that thread's operations are seen on
    the host."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._running: profile | None = None
        self._folder = Path()

    def turn(self, folder: str | None) -> str:
        """With a folder it starts, and the folder is told; None stops it, and the file is told."""
        return self._start(Path(folder)) if folder is not None else self._stop()

    def _start(self, folder: Path) -> str:
        if self._running is not None:
            raise Conflict("a profile is running already: stop it first")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"--profile-dir {folder}: {error.strerror}") from None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running, self._folder = profile(activities=activities), folder
        self._running.start()
        return str(folder)

    def _stop(self) -> str:
        if self._running is None:
            raise Conflict("no profile is running: start one first")
        running, self._running = self._running, None
        running.stop()
        name = f"worker-{self._rank}-{os.getpid()}-{time.time_ns() // 1_000_000}.json.gz"
        running.export_chrome_trace(str(self._folder / name))
        return str(self._folder / name)
