"""Which executor runs the steps: the one place that knows all of them by name. Imports none until it is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from headrace.back.platforms import huge_pages
from headrace.base import env
from headrace.base.affinity import openmp_environment
from headrace.base.collector import put_off
from headrace.base.config.resolved import EngineSpec, ModelSpec
from headrace.base.config.weight_files import find_weight_files
from headrace.base.errors import ConfigError
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
    """Builds the executor that `spec.device.executor` names; returns once its workers are loaded."""
    device = spec.device
    if device.executor == "inline" and device.tensor_parallel > 1:
        raise ConfigError(
            f"--executor inline runs one worker, --tensor-parallel asks for {device.tensor_parallel}: "
            "use --executor processes",
            field="executor",
        )
    for name, value in openmp_environment(device.threads * device.tensor_parallel).items():
        env.set_default(name, value)
    if device.executor == "inline" and device.device == "cpu":
        huge_pages.expect(_bytes_as_stored(spec.model))
    try:
        with put_off():
            executor = EXECUTORS.load(device.executor)
        return cast(Executor, executor(spec))
    finally:
        huge_pages.settle()


def _bytes_as_stored(model: ModelSpec) -> int:
    """What the weights will take where that is what their files take, else 0."""
    config = model.config
    plain = model.format == "safetensors" and model.quantization is None
    if not plain or model.dtype not in (config.get("dtype"), config.get("torch_dtype")):
        return 0
    return sum(path.stat().st_size for path in find_weight_files(Path(model.path)).files)
