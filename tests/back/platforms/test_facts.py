"""Architecture names and visible-device settings are read without a device (PLT-04)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.back.platforms.detect import FAKES
from headrace.back.platforms.facts import (
    Capability,
    DeviceFacts,
    among_visible,
    freest,
    parse_gfx,
    visible_devices,
    visible_environment,
)
from headrace.base import env
from headrace.base.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("gfx90a", (9, 0, 10)),
        ("gfx942", (9, 4, 2)),
        ("gfx950", (9, 5, 0)),
        ("gfx1030", (10, 3, 0)),
        ("gfx1100", (11, 0, 0)),
        ("gfx1201", (12, 0, 1)),
        ("gfx942:sramecc+:xnack-", (9, 4, 2)),
    ],
)
def test_gfx_names_are_read_from_the_right(name: str, capability: tuple[int, int, int]) -> None:
    assert parse_gfx(name) == Capability(*capability)


@pytest.mark.parametrize(
    "junk", ["", "gfx", "gfx9", "gfx94", "sm_90", "gfx94x", "gfx9423456", "GFX942", "gfx942 "]
)
def test_junk_is_refused_by_name(junk: str) -> None:
    with pytest.raises(ConfigError, match="AMD architecture"):
        parse_gfx(junk)


@pytest.mark.parametrize(
    ("cuda", "hip", "devices"),
    [
        (None, None, None),
        ("", None, ()),
        (None, "", ()),
        ("", "", ()),
        ("", "1", ("1",)),
        ("0, 2", None, ("0", "2")),
        ("3", "3", ("3",)),
        ("0,1", "0, 1", ("0", "1")),
    ],
)
def test_either_variable_counts_and_empty_alone_means_none(
    cuda: str | None, hip: str | None, devices: tuple[str, ...] | None
) -> None:
    assert visible_devices(cuda, hip) == devices


def test_contradicting_variables_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=0 .* HIP_VISIBLE_DEVICES=1"):
        visible_devices("0", "1")


def test_a_childs_devices_are_said_alike_under_both_names_and_never_contradict() -> None:
    told = visible_environment(("GPU-11", "2"))
    assert told["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    both = told["CUDA_VISIBLE_DEVICES"], told["HIP_VISIBLE_DEVICES"]
    assert visible_devices(*both) == ("GPU-11", "2")


def gpu(index: int, uuid: str, free: int) -> DeviceFacts:
    return DeviceFacts(
        kind="cuda", index=index, uuid=uuid, name="GPU", arch="sm_90", memory_bytes=100, free_bytes=free
    )  # fmt: skip


GPUS = (gpu(0, "GPU-aaaa1111", 10), gpu(1, "GPU-bbbb2222", 90), gpu(2, "GPU-cccc3333", 50))


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, (0, 1, 2)),
        ((), ()),
        (("2", "0"), (2, 0)),
        (("GPU-bbbb2222",), (1,)),
        (("GPU-cc", "0"), (2, 0)),
        (("0", "7", "1"), (0,)),
        (("-1",), ()),
        (("GPU-",), ()),
    ],
)
def test_visible_devices_are_named_as_the_drivers_read_them(
    visible: tuple[str, ...] | None, indices: tuple[int, ...]
) -> None:
    assert tuple(one.index for one in among_visible(GPUS, visible)) == indices


def test_the_freest_gpu_is_found_by_uuid_whatever_order_the_runtime_has() -> None:
    assert freest(GPUS, ["cccc3333", "bbbb2222", "aaaa1111"]) == 1
    assert freest(GPUS, ["aaaa1111", "cccc3333"]) == 1
    assert freest(GPUS, ["unknown", "other"]) == freest((), []) == 0


def test_amd_gpus_are_cuda_to_pytorch() -> None:
    assert FAKES["mi300x"].torch_kind == "cuda" and FAKES["mi300x"].kind == "rocm"
    assert FAKES["h200"].torch_kind == "cuda"


def test_importing_and_detecting_neither_loads_torch_nor_touches_a_device() -> None:
    """PLT-04, REG-118."""
    program = (
        "import sys, headrace, headrace.base.config.tree\n"
        "from headrace.back.platforms.detect import detect\n"
        "assert any(one.kind == 'cpu' for one in detect())\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env.child_environment()
    )
    assert done.returncode == 0, done.stderr
