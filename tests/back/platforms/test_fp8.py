"""Which encoding of 8-bit floats a device multiplies. PLT-01."""

from __future__ import annotations

import pytest
import torch

from headrace.back.platforms.detect import FAKES
from headrace.back.platforms.facts import parse_gfx
from headrace.back.platforms.fp8 import FNUZ, OCP, Fp8Encoding, fp8_encoding


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("gfx90a", None), ("gfx942", FNUZ), ("gfx942:sramecc+:xnack-", FNUZ), ("gfx950", OCP),
        ("gfx1100", None), ("gfx1200", OCP), ("gfx1201", OCP),
    ],
)  # fmt: skip
def test_amds_first_encoding_is_that_of_gfx942_alone(
    arch: str, expected: Fp8Encoding | None
) -> None:
    """REG-117."""
    device = FAKES["mi300x"]
    found = type(device)(
        **{field: getattr(device, field) for field in device.__dataclass_fields__}
        | {"arch": arch, "capability": parse_gfx(arch)}
    )
    assert fp8_encoding(found) is expected


def test_nvidias_is_that_of_the_standard_from_8_9_on() -> None:
    found = {name: fp8_encoding(device) for name, device in FAKES.items()}
    assert found["h200"] is OCP and found["mi300x"] is FNUZ and found["mi355x"] is OCP
    cuda = {name: device for name, device in FAKES.items() if device.kind == "cuda"}
    for name, device in cuda.items():
        assert device.capability is not None
        assert (found[name] is OCP) == (tuple(device.capability)[:2] >= (8, 9)), name
    assert all(found[name] is None for name, device in FAKES.items() if device.kind == "cpu")


@pytest.mark.parametrize("encoding", [OCP, FNUZ])
def test_an_encodings_numbers_are_pytorchs(encoding: Fp8Encoding) -> None:
    """All 256 bytes: the largest number, and a single zero where there is no negative one."""
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, encoding.torch_name)).float()
    finite = values[values.isfinite()]
    assert finite.max() == encoding.largest
    assert (finite == 0).sum() == (1 if encoding is FNUZ else 2)
    assert values.isnan().sum() == (1 if encoding is FNUZ else 2)
