"""Devices are described from drivers' files, within what a container may use; fakes stand in for
the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.back.platforms import detect as detection
from headrace.back.platforms.cpu import cpu_facts, memory_limit, usable_cores
from headrace.back.platforms.cuda import cuda_facts
from headrace.back.platforms.detect import FAKES, detect, device
from headrace.back.platforms.rocm import rocm_facts
from headrace.base.errors import ConfigError


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("quota", "most"), [("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 10**6)]
)
def test_a_cpu_quota_cuts_the_cores(tmp_path: Path, quota: str, most: int) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(cgroup(tmp_path, cpu_max=quota)) == min(allowed, most)


def test_a_memory_limit_cuts_total_and_free_memory(tmp_path: Path) -> None:
    folder = cgroup(tmp_path, memory_max="1000000\n", memory_current="400000\n")
    facts = cpu_facts(cgroup=folder)
    assert (facts.memory_bytes, facts.free_bytes) == (1_000_000, 600_000)
    assert memory_limit(cgroup(tmp_path, memory_max="max\n")) is None


def test_cpu_features_come_from_the_first_core(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\n"
    )
    facts = cpu_facts(cpuinfo=info)
    assert facts.name == "Some CPU"
    assert facts.features == {"fpu", "avx2", "avx512_bf16"}


def test_amd_gpus_are_read_from_sysfs_and_cpu_nodes_are_skipped(tmp_path: Path) -> None:
    for number, text in enumerate(
        [
            "gfx_target_version 0\n",
            "gfx_target_version 90402\nsimd_count 1216\nsimd_per_cu 4\ndrm_render_minor 128\nunique_id 2748\n",
        ]
    ):
        (tmp_path / str(number) / "mem_banks" / "0").mkdir(parents=True)
        (tmp_path / str(number) / "properties").write_text(text)
        (tmp_path / str(number) / "mem_banks" / "0" / "properties").write_text(
            "size_in_bytes 4096\n"
        )
    used = tmp_path / "drm" / "renderD128" / "device"
    used.mkdir(parents=True)
    (used / "mem_info_vram_used").write_text("96\n")
    (only,) = rocm_facts(topology=tmp_path, drm=tmp_path / "drm")
    assert (only.free_bytes, only.uuid) == (4000, "GPU-0000000000000abc")
    assert rocm_facts(("GPU-0000000000000abc",), topology=tmp_path) != ()
    assert (only.arch, only.capability, only.cores, only.memory_bytes) == (
        "gfx942",
        (9, 4, 2),
        304,
        4096,
    )
    assert rocm_facts(("7",), topology=tmp_path) == ()


def test_nvidia_gpus_are_described_without_a_context() -> None:
    for facts in cuda_facts():
        assert facts.memory_bytes >= facts.free_bytes > 0
        assert facts.capability is not None and facts.capability.major >= 5
    assert cuda_facts(("no-such-device",)) == ()


def test_no_gpu_is_chosen_where_the_variable_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, ...] | None] = []
    monkeypatch.setattr(detection, "cuda_facts", lambda visible: shown.append(visible) or ())
    monkeypatch.setattr(detection, "rocm_facts", lambda visible: shown.append(visible) or ())
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [one.kind for one in detect()] == ["cpu"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    detect()
    assert shown == [(), (), None, None]


def test_an_amd_gpu_is_chosen_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "detect", lambda: (FAKES["mi300x"], FAKES["h200"]))
    assert device("auto") is device("cuda") is FAKES["mi300x"]


def test_a_fake_is_taken_by_name_and_the_cpu_is_always_here() -> None:
    assert device("H200") is FAKES["h200"]
    assert device("cpu").kind == "cpu"


def test_an_absent_device_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'tpu' is not here \(here: .*cpu"):
        device("tpu")
