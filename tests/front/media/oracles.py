"""Processors of transformers whose modules want torchvision, which is not what is compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Modules imported within find an empty torchvision, and are forgotten afterwards."""
    before = set(sys.modules)
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in (*names, names[-1] + ".functional")}
    modules[names[-1]].functional = modules[names[-1] + ".functional"]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in {*modules, *(set(sys.modules) - before)}:
            if name in modules or name.startswith("transformers.models."):
                sys.modules.pop(name, None)
