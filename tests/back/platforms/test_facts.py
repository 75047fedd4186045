"""Architecture names and visible-device settings are read without a device (PLT-04)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.back.platforms.facts import Capability, parse_gfx, visible_devices
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
        ("", None, None),
        ("", "1", ("1",)),
        ("0, 2", None, ("0", "2")),
        ("3", "3", ("3",)),
        ("0,1", "0, 1", ("0", "1")),
    ],
)
def test_either_variable_counts_and_empty_is_unset(
    cuda: str | None, hip: str | None, devices: tuple[str, ...] | None
) -> None:
    assert visible_devices(cuda, hip) == devices


def test_contradicting_variables_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=0 .* HIP_VISIBLE_DEVICES=1"):
        visible_devices("0", "1")


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
