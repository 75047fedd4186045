"""What may be added to an engine core: conditions on running a request that options ask for, and
extensions (base/extensions.py): further conditions, and readers of its figures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from headrace.base import extensions
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.retention import ROUTING_KEY
from headrace.base.wire.step import StepPlan
from headrace.core.compute_meter import ComputeMeter
from headrace.core.core import EngineCore
from headrace.core.kv_events import KVEvents
from headrace.core.kv_retention import KVRetentions
from headrace.core.ports import AdmissionHook, StatsSink
from headrace.core.scheduler.full_lengths import FullLengths
from headrace.core.scheduler.orders import RoutingKeys
from headrace.launch.kv_events import KVEventServer, event_socket

log = logging.getLogger(__name__)


def chosen_hooks(
    spec: EngineSpec, core: Callable[[], EngineCore], *, core_socket: str
) -> list[AdmissionHook]:
    """Those of `--no-evict`, `--kv-retention`, `--kv-events-path` and `--policy routing-key`.
    `core_socket`: where this core listens."""
    hooks: list[AdmissionHook] = []
    if spec.scheduler.no_evict:
        hooks.append(FullLengths(lambda: core().kv, spec.scheduler.max_step_tokens))
    if spec.scheduler.mfu_metrics:
        from headrace.launch.compute_cost import step_cost

        hooks.append(ComputeMeter(step_cost(spec)))
    if spec.kv.choices.retention:
        hooks.append(KVRetentions(core))
    if spec.scheduler.policy == ROUTING_KEY.replace("_", "-"):
        hooks.append(RoutingKeys())
    if (path := event_socket(spec.kv, core_socket)) is not None:
        hooks.append(KVEvents(KVEventServer(path).tell, core))
    return hooks


def extension_hooks(
    spec: EngineSpec, others: Sequence[AdmissionHook], core: Callable[[], EngineCore]
) -> list[AdmissionHook]:
    """The admission hooks that may be used, behind `others`; ConfigError for one whose name is
    taken. `core`: the core, once it is there."""
    names = {hook.name for hook in others}
    hooks: list[AdmissionHook] = []
    for name in extensions.allowed(extensions.ADMISSION_HOOKS):
        hook = cast(AdmissionHook, _extension_of(extensions.ADMISSION_HOOKS, name, spec, core))
        if hook.name in names:
            raise ConfigError(
                f"extension {name}: the name {hook.name!r} is another hook's", field="extensions"
            )
        names.add(hook.name)
        hooks.append(hook)
    return hooks


def stats_of(spec: EngineSpec, hooks: Sequence[AdmissionHook]) -> StatsSink | None:
    """The readers of figures, as one: the hook that counts operations, and the packages' that may
    be used; None: there are none."""
    meter = next((hook for hook in hooks if isinstance(hook, ComputeMeter)), None)
    sinks = {
        name: cast(PackageSink, _extension_of(extensions.STATS, name, spec))
        for name in extensions.allowed(extensions.STATS)
    }
    return _Sinks(sinks, meter) if sinks else meter


def _extension_of(group: str, name: str, *arguments: object) -> object:
    """What the extension's function gives; ConfigError with its name if it fails."""
    make = cast(Callable[..., object], extensions.load(group, name))
    try:
        return make(*arguments)
    except Exception as error:
        raise ConfigError(
            f"extension {name} failed: {type(error).__name__}: {error}", field="extensions"
        ) from error


class PackageSink(Protocol):
    """A StatsSink as packages write it, which sees no plan."""

    def step(
        self, *, running: int, waiting: int, tokens: int, free_blocks: int, host_s: float
    ) -> None:
        """See StatsSink."""
        ...

    def finished(self, *, reason: str, num_prompt: int, num_output: int, num_cached: int) -> None:
        """See StatsSink."""
        ...


class _Sinks:
    """Several readers. One that fails is left out from then on, and the log says so."""

    def __init__(self, sinks: dict[str, PackageSink], meter: ComputeMeter | None) -> None:
        self._sinks, self._meter = sinks, meter

    def step(self, *, plan: StepPlan, **figures: Any) -> None:
        """See StatsSink."""
        if self._meter is not None:
            self._meter.step(plan=plan, **figures)
        for name, sink in tuple(self._sinks.items()):
            try:
                sink.step(**figures)
            except Exception:
                self._leave_out(name)

    def finished(self, **figures: Any) -> None:
        """See StatsSink."""
        for name, sink in tuple(self._sinks.items()):
            try:
                sink.finished(**figures)
            except Exception:
                self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        log.exception("extension %s failed, and is told no more figures", name)
        del self._sinks[name]
