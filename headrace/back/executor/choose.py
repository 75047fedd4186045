"""Which executor runs the steps: the one place that knows all of them by name. Imports none until it is chosen."""

from __future__ import annotations

import os
from typing import cast

from headrace.base import env
from headrace.base.config.resolved import EngineSpec
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
    """Builds the executor that `spec.device.executor` names; returns once its workers are loaded.

    Where the workers' threads take every core, OpenMP's must not spin while they wait: one disturbed thread would hold
    up all (an 8 x 1024 x 3072 product took 12 ms instead of 0.4). It must be said before torch is loaded.
    """
    device = spec.device
    if device.executor == "inline" and device.tensor_parallel > 1:
        raise ConfigError(
            f"--executor inline runs one worker, --tensor-parallel asks for {device.tensor_parallel}: "
            "use --executor processes",
            field="executor",
        )
    if device.threads * device.tensor_parallel >= len(os.sched_getaffinity(0)):
        env.set_default("OMP_WAIT_POLICY", "passive")
    return cast(Executor, EXECUTORS.load(device.executor)(spec))
