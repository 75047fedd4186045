"""One rank's loaded model and the runner over it, which may be given up and made again without a
load."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from headrace.back.executor.host_copy import HostCopy
from headrace.back.models.protocol import CausalModel
from headrace.back.platforms import huge_pages
from headrace.back.runner.runner import Runner


class Resident:
    """`runner` is there unless the model is parked. Its weights are on `device`; parked, in host
    memory (of a CPU they are there already). All methods are called by the thread that runs the
    steps."""

    def __init__(
        self, model: CausalModel, device: torch.device, runner: Runner, again: Callable[[], Runner]
    ) -> None:
        self._model: CausalModel | None = model
        self._device = device
        self._again: Callable[[], Runner] | None = again
        self._copy: HostCopy | None = None
        self._runner: Runner | None = runner

    @property
    def runner(self) -> Runner:
        """What runs the steps."""
        assert self._runner is not None, "the model is parked"
        return self._runner

    def park(self) -> None:
        """Gives up the KV cache and everything else a runner holds; then the weights leave the
        device."""
        self.runner.release()
        self._runner = None
        gc.collect()
        if self._device.type != "cpu":
            self._copy = HostCopy(self._model, self._device)
        self._let_go()

    def unpark(self) -> Runner:
        """The runner, made anew over the weights that are back."""
        if self._copy is not None:
            self._copy.back()
            self._copy = None
        assert self._again is not None, "the model was given up"
        self._runner = self._again()
        return self._runner

    def close(self) -> None:
        """Gives up the model too, for good. Whoever holds this object holds no memory with it."""
        self._model = self._again = self._copy = self._runner = None
        gc.collect()
        self._let_go()

    def _let_go(self) -> None:
        """Memory that is free in this process goes back to the device and the system."""
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream there was
            torch.cuda.empty_cache()
        huge_pages.trim()
