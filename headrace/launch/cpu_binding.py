"""Which CPUs the kernel threads of a single CPU worker are bound to: the user's list, or the
placement of the machine (back/platforms/placement.py)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.config.cpu_list import parse_cpu_list
from headrace.base.errors import ConfigError

FLAG = "--cpu-binding"


def bound_cpus(
    binding: str,
    *,
    placed: tuple[int, ...],
    usable: Sequence[int],
    threads: int | str,
    single: bool,
) -> tuple[int, ...]:
    """The CPUs, one per thread; empty: not bound. `placed` is what "auto" takes, `usable` what this
    process may use, `single`: there is one worker, and it computes on the CPU."""
    if binding == "none":
        return ()
    if binding == "auto":
        # With a number of threads stated, cores are left to the system: others may have the rest.
        return placed if single and threads == "auto" else ()
    if not single:
        raise ConfigError(
            f"{FLAG} {binding}: it binds a single worker on the CPU; leave it auto with several "
            "workers, replicas or a GPU",
            field=FLAG,
        )
    try:
        cpus = parse_cpu_list(binding)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {binding}: {error}", field=FLAG) from None
    foreign = sorted(set(cpus) - set(usable))
    if foreign:
        raise ConfigError(
            f"{FLAG} {binding}: CPU {foreign[0]} is not usable here (usable: "
            f"{', '.join(map(str, sorted(usable)))})",
            field=FLAG,
        )
    if threads not in ("auto", len(cpus)):
        raise ConfigError(
            f"{FLAG} {binding} binds {len(cpus)} threads; --threads {threads} contradicts it",
            field=FLAG,
        )
    return cpus
