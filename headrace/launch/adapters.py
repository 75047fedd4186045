"""The adapters of an engine core: those it takes, and those it loads when it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import ConfigError, HeadraceError
from headrace.core.adapters import Adapters
from headrace.core.ports import AdapterWorkers, Executor
from headrace.launch.weights_source import WeightsSource

log = logging.getLogger(__name__)


def adapters_of(spec: EngineSpec, executor: Callable[[], Executor]) -> Adapters | None:
    """The adapters of an engine, if it takes any; `executor`: the one that is installed."""
    if spec.model.adapters is None:
        return None
    return Adapters(
        spec.model.adapters, lambda order: cast(AdapterWorkers, executor()).adapt(order)
    )


def load_adapters(
    spec: EngineSpec, adapters: Adapters, source: WeightsSource, *, asleep: bool
) -> None:
    """Those that the operator named, which end the start if they do not fit, and those that were
    loaded while a core before this one ran; a core that begins asleep reads them later."""
    assert spec.model.adapters is not None
    for name, folder in spec.model.adapters.modules:
        try:
            if asleep:
                adapters.know(name, folder)
                continue
            adapters.load_now(name, folder, trusted=True)
        except HeadraceError as error:
            raise ConfigError(
                f"--lora-modules {name}={folder}: {error.message}", field="lora_modules"
            ) from None
    for name, folder in spec.model.adapters.loaded:
        try:
            if asleep:
                adapters.know(name, folder)
                continue
            adapters.load_now(name, folder, trusted=False)
        except HeadraceError as error:
            log.error("adapter %s of %s is not loaded again: %s", name, folder, error.message)
    adapters.keep = source.keep_adapters
