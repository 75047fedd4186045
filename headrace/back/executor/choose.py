"""Which executor runs the steps: the one place that knows all of them by name. Imports none until
it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from headrace.back.kernels.triton import compilers
from headrace.back.platforms import huge_pages
from headrace.back.platforms.cpu import usable_cores
from headrace.base import env, extensions
from headrace.base.config.quantization_options import WEIGHT_BITS
from headrace.base.config.resolved import EngineSpec, ModelSpec
from headrace.base.config.weight_files import find_weight_files
from headrace.base.errors import ConfigError
from headrace.base.gc_pause import collection_paused
from headrace.base.registry import Registry
from headrace.core.ports import Executor

EXECUTORS: Registry[type] = Registry(
    "executor",
    {
        "inline": "headrace.back.executor.inline:InlineExecutor",
        "processes": "headrace.back.executor.processes:ProcessExecutor",
        "null": "headrace.back.executor.null:NullExecutor",
    },
)


def make_executor(spec: EngineSpec) -> Executor:
    """Builds the executor that `spec.device.executor` names; returns once its workers are loaded.

    Where the workers' threads take every core, OpenMP's must not spin while they wait: one
    disturbed thread would hold up all (an 8 x 1024 x 3072 product took 12 ms instead of 0.4). It
    must be said before torch is loaded.
    """
    device = spec.device
    if device.executor == "inline" and device.world_size > 1:
        raise ConfigError(
            f"--executor inline runs one worker, --tensor-parallel and --pipeline-parallel ask for "
            f"{device.world_size}: use --executor processes",
            field="executor",
        )
    if device.threads * device.world_size >= usable_cores():
        env.set_default("OMP_WAIT_POLICY", "passive")
    if device.executor == "inline" and device.device == "cpu":
        huge_pages.expect(_expected_bytes(spec.model))
    try:
        with compilers.expected(device.device if device.executor == "inline" else "elsewhere"):
            with collection_paused():
                make = _maker(device.executor)
            return cast(Executor, make(spec))
    finally:
        huge_pages.settle()


def _maker(name: str) -> Callable[[EngineSpec], object]:
    if name in extensions.allowed(extensions.EXECUTORS):
        return cast("Callable[[EngineSpec], object]", extensions.load(extensions.EXECUTORS, name))
    return EXECUTORS.load(name)


def _expected_bytes(model: ModelSpec) -> int:
    """About what the weights will take, where their files say so: as much, or what is left of it
    once they are quantized (each as it comes: what is made ready is in use before more is needed).
    Else 0."""
    config = model.config
    as_stored = model.dtype in (config.get("dtype"), config.get("torch_dtype"))
    if model.format != "safetensors" or model.weights_url is not None or not as_stored:
        return 0
    stored = sum(path.stat().st_size for path in find_weight_files(Path(model.path)).files)
    if model.quantization is None:
        return stored
    if model.quantization_parts is not None:
        return stored  # at most
    bits = WEIGHT_BITS[model.quantization]
    return int(stored * bits) // (32 if model.dtype == "float32" else 16)
