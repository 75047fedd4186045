"""What the native.py of every op shares: the reasons not to serve, and the numbers of the element
types."""

from __future__ import annotations

import torch

from headrace.back.kernels.native.library import NativeLibrary, load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def unsupported(device: str, dtype: torch.dtype) -> str | None:
    """The reason that holds for every native kernel: wrong device, no library, unknown element
    type."""
    if device != "cpu":
        return "runs on the CPU only"
    if isinstance(library := load(), str):
        return library
    if dtype not in DTYPES:
        return f"knows {', '.join(str(known) for known in DTYPES)}, not {dtype}"
    return None


def loaded() -> NativeLibrary:
    """The library, after `unsupported` has found it."""
    library = load()
    assert isinstance(library, NativeLibrary), library
    return library
