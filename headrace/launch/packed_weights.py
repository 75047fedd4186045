"""Weights that lie compressed in a checkout, as `model.safetensors.xz`: a third smaller, as the
exponents of bf16 weights are much alike. They are unpacked beside it by whoever needs them first;
what is installed holds them unpacked.

setup.py loads this file by itself: nothing of headrace is imported here.
"""

from __future__ import annotations

import lzma
import os
import shutil
from pathlib import Path

CHUNK_BYTES = 1 << 20


def unpack_weights(folder: Path) -> list[Path]:
    """Unpacks what lies packed in a folder, unless that is done and no older; the packed files.
    OSError where it cannot be written."""
    packed_files = sorted(folder.glob("*.safetensors.xz"))
    for packed in packed_files:
        plain = packed.with_suffix("")
        if plain.exists() and plain.stat().st_mtime >= packed.stat().st_mtime:
            continue
        partial = folder / f"{plain.name}.{os.getpid()}.part"  # several processes may be first
        with lzma.open(packed) as source, partial.open("wb") as whole:
            shutil.copyfileobj(source, whole, CHUNK_BYTES)
        partial.replace(plain)
    return packed_files
