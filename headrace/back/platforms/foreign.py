"""Devices that installed packages bring: what such a package states, and where it is asked.

A platform is named by `--device`. It says which devices there are, how PyTorch names them, and
which kernels it has beside ours: those are asked first, and are checked against the reference as
ours are. Ops without a kernel for the device run the reference, which is plain PyTorch. Steps are
of their own size and not recorded, unless PyTorch calls the device "cpu" or "cuda".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from headrace.back.platforms.facts import DeviceFacts
from headrace.base import extensions
from headrace.base.errors import ConfigError

OWN = ("auto", "cpu", "cuda")
"""What `--device` takes without packages."""


class Platform(Protocol):
    """See the top of the file.

    kernels   by name of an op: "module:attribute" of each Kernel (back/kernels/op.py), best first
    """

    kernels: Mapping[str, Sequence[str]]

    def facts(self) -> Sequence[DeviceFacts]:
        """The devices this process may use, with their memory; none: there are none here."""
        ...

    def torch_device(self, index: int) -> str:
        """PyTorch's name of the device with this number, ready for use, as "xpu:0"."""
        ...


def is_foreign(kind: str) -> bool:
    """Whether a package brings the devices of this kind; ConfigError for one that nobody knows."""
    allowed = extensions.allowed(extensions.PLATFORMS)
    if kind in OWN or kind in allowed:
        return kind in allowed
    known = ", ".join((*OWN, *allowed))
    raise ConfigError(
        f"--device {kind!r} is not known (known: {known}; --extensions says which packages' are)",
        field="device",
    )


def platform_of(kind: str) -> Platform:
    """The platform of a package; ConfigError if it cannot be imported."""
    return cast(Platform, extensions.load(extensions.PLATFORMS, kind))


def devices_of(kind: str) -> Sequence[DeviceFacts]:
    """The devices of a package's platform; ConfigError if it fails, or there are none."""
    platform = platform_of(kind)
    try:
        devices = platform.facts()
    except Exception as error:
        raise ConfigError(
            f"extension {kind} failed: {type(error).__name__}: {error}", field="device"
        ) from error
    if not devices:
        raise ConfigError(f"--device {kind}: no such device is here", field="device")
    return devices
