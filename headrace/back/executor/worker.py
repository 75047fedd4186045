"""What a worker does, in its own process or in a thread of the core's: threads, model, runner."""

from __future__ import annotations

import time
from typing import Any

import torch

from headrace.back.models.protocol import CausalModel
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.runner import Runner
from headrace.base.config.resolved import EngineSpec
from headrace.base.registry import Registry

DEFAULT_LOADER = "headrace.back.models.load:load_model"


def set_threads(threads: int) -> None:
    """Bounds torch's threads for work started from the calling thread."""
    torch.set_num_threads(threads)


def build_runner(spec: EngineSpec, loader: str = DEFAULT_LOADER, mesh: Mesh = Mesh()) -> Runner:
    """Loads the model with `loader` ("module:attribute") and builds the runner on this rank's device."""
    load_model: Any = Registry("model loader", {"model": loader}).load("model")
    device = torch.device(spec.device.device)
    began = time.perf_counter()
    model: CausalModel = load_model(spec.model, mesh, device)
    return Runner(spec, model, device=device, start_s={"load": time.perf_counter() - began})
