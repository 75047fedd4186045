"""Optional third-party libraries: imported by name on use, with a message that says what to
install."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from headrace.base.errors import MissingDependency


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports `module`; MissingDependency names the extra that brings it if it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"{purpose} needs the library {module.partition('.')[0]!r}: pip install 'headrace[{extra}]' ({error})"
        ) from error


def available(module: str) -> bool:
    """Whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
