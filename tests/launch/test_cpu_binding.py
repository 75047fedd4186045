"""--cpu-binding: the CPUs of the kernel threads, as listed, placed, or left to the system."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.errors import ConfigError
from tests.launch.test_resolve import CPU, CUDA, resolved

MACHINE = msgspec.structs.replace(
    CPU, cores=8, usable_cpus=tuple(range(8)), cpus=(0, 2, 4, 6), other_cpus=(1, 3, 5, 7)
)


def test_a_list_binds_one_thread_to_each_cpu_and_leaves_the_rest_to_the_others() -> None:
    device = resolved(MACHINE, device={"cpu_binding": "0-2,7"}).engine.device
    assert (device.cpus, device.threads, device.other_cpus) == ((0, 1, 2, 7), 4, (3, 4, 5, 6))


def test_auto_takes_the_placement_and_none_binds_nothing() -> None:
    placed = resolved(MACHINE).engine.device
    assert (placed.cpus, placed.threads, placed.other_cpus) == ((0, 2, 4, 6), 4, (1, 3, 5, 7))
    free = resolved(MACHINE, device={"cpu_binding": "none"}).engine.device
    assert (free.cpus, free.threads, free.other_cpus) == ((), 8, ())
    stated = resolved(MACHINE, device={"threads": 3}).engine.device
    assert (stated.cpus, stated.threads) == ((), 3)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("3-1", "no range"),
        ("1,1", "listed twice"),
        ("0,8", "CPU 8 is not usable here"),
        ("0-99999999", "no range"),
    ],
)
def test_a_wrong_list_is_refused_by_flag_and_value(binding: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--cpu-binding {binding}: .*{message}"):
        resolved(MACHINE, device={"cpu_binding": binding})


def test_a_list_contradicts_other_threads_several_workers_and_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--threads 3 contradicts"):
        resolved(MACHINE, device={"cpu_binding": "0,1", "threads": 3})
    with pytest.raises(ConfigError, match="single worker"):
        resolved(MACHINE, device={"cpu_binding": "0,1", "replicas": 2})
    with pytest.raises(ConfigError, match="single worker"):
        resolved(CUDA, device={"cpu_binding": "0,1"})
    with pytest.raises(msgspec.ValidationError):
        resolved(MACHINE, device={"cpu_binding": "0;1"})
