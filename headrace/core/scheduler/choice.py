"""The scheduler of an engine core: ours, or one of an installed package (`--scheduler-cls`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from headrace.base import extensions
from headrace.base.config.resolved import SchedulerSpec
from headrace.base.errors import ConfigError
from headrace.core.scheduler.scheduler import Scheduler


def scheduler_of(spec: SchedulerSpec, *parts: Any) -> Scheduler:
    """The scheduler over these parts (see `Scheduler`); ConfigError with the extension's name if it
    fails, or gives something else."""
    name = spec.scheduler_cls
    if name is None:
        return Scheduler(spec, *parts)
    make = cast(Callable[..., object], extensions.load(extensions.SCHEDULERS, name))
    try:
        scheduler = make(spec, *parts)
    except Exception as error:
        raise ConfigError(
            f"extension {name} failed: {type(error).__name__}: {error}", field="scheduler_cls"
        ) from error
    if not isinstance(scheduler, Scheduler):
        raise ConfigError(
            f"extension {name} gives a {type(scheduler).__name__}: a Scheduler is wanted",
            field="scheduler_cls",
        )
    return scheduler


def check_scheduler(name: str | None) -> None:
    """ConfigError where no scheduler of that name may be used."""
    known = extensions.allowed(extensions.SCHEDULERS)
    if name is not None and name not in known:
        raise ConfigError(
            f"--scheduler-cls {name}: no scheduler of that name is allowed by --extensions (allowed: "
            f"{', '.join(sorted(known)) or 'none'})",
            field="scheduler_cls",
        )
