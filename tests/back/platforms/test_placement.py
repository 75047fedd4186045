"""Where threads and memory go, on machines that are not here (PLT-11, REG-123): topologies as the
system shows them."""

import ctypes
import platform
import threading
from pathlib import Path

import pytest

from headrace.back.platforms.placement import _SET_MEMPOLICY, interleave, parse_list, place


def machine(root: Path, cores: list[list[int]], nodes: list[list[int]], quota: str = "max 100000"):
    """Folders like the system's: the CPUs of each core, the CPUs of each node."""
    for core in cores:
        for cpu in core:
            folder = root / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "core_cpus_list").write_text(",".join(map(str, core)) + "\n")
    for number, cpus in enumerate(nodes):
        (root / f"node/node{number}").mkdir(parents=True)
        (root / f"node/node{number}/cpulist").write_text(f"{cpus[0]}-{cpus[-1]}\n")
    (root / "cgroup").mkdir()
    (root / "cgroup/cpu.max").write_text(quota + "\n")
    return {"system": root / "cpu", "nodes": root / "node", "cgroup": root / "cgroup"}


def test_two_cores_are_shared(tmp_path):
    found = place([0, 1], **machine(tmp_path, [[0], [1]], [[0, 1]]))
    assert found.kernels == found.others == () and found.nodes == (0,)
    assert found.why == "2 physical cores: all processes share them"


def test_four_hyperthreads_of_two_cores_are_two_cores(tmp_path):
    assert place([0, 1, 2, 3], **machine(tmp_path, [[0, 2], [1, 3]], [[0, 3]])).kernels == ()


def test_of_four_cores_the_last_is_left_with_both_its_halves(tmp_path):
    cores = [[0, 4], [1, 5], [2, 6], [3, 7]]
    found = place(range(8), **machine(tmp_path, cores, [[0, 7]]))
    assert found.kernels == (0, 1, 2) and found.others == (3, 7)
    assert "one thread on each of 3 physical cores, the API process on the last" in found.why


def test_only_what_the_mask_allows_is_used(tmp_path):
    """A cpuset that holds the second halves of some cores, and a part of the second node."""
    cores = [[i, i + 8] for i in range(8)]
    found = place(
        [9, 10, 3, 11, 12], **machine(tmp_path, cores, [[0, 3], [4, 7], [8, 11], [12, 15]])
    )
    assert found.kernels == (3, 9, 10) and found.others == (12,)
    assert found.nodes == (0, 2)


def test_two_sockets_take_memory_from_both_nodes(tmp_path):
    found = place(range(8), **machine(tmp_path, [[i] for i in range(8)], [[0, 3], [4, 7]]))
    assert len(found.kernels) == 7 and found.nodes == (0, 1)


@pytest.mark.parametrize(
    ("quota", "placed"),
    [("400000 100000", False), ("350000 100000", False), ("800000 100000", True), ("max 1", True)],
)
def test_under_a_quota_the_system_places_the_threads(tmp_path, quota, placed):
    found = place(range(8), **machine(tmp_path, [[i] for i in range(8)], [[0, 7]], quota))
    assert bool(found.kernels) == placed
    assert placed or "quota is 4 of 8 cores" in found.why


def test_a_system_that_tells_nothing_has_a_core_per_cpu(tmp_path):
    nothing = {"system": tmp_path / "a", "nodes": tmp_path / "b", "cgroup": tmp_path / "c"}
    found = place([0, 1, 2], **nothing)
    assert found.kernels == (0, 1) and found.others == (2,) and found.nodes == ()


def test_lists_of_cpus_are_read_as_the_kernel_writes_them():
    assert parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_list("") == parse_list("\n") == set()


def policy() -> int:
    """The calling thread's memory policy."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode = ctypes.c_int(-1)
    assert (
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.byref(mode), None, 0, None, 0) == 0
    )
    return mode.value


@pytest.mark.skipif(platform.machine() not in _SET_MEMPOLICY, reason="needs memory policies")
def test_the_system_takes_the_policy_for_the_thread_and_those_it_starts():
    seen = []

    def work():
        seen.append(interleave([0]))
        seen.append(policy())
        child = threading.Thread(target=lambda: seen.append(policy()))
        child.start()
        child.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if seen[0]:
        assert seen == [True, 3, 3] and policy() == 0
    else:
        assert seen == [False, 0, 0]
    assert not interleave([])
