"""Names that stand for code: name -> "module:attribute", imported on first use.

A registry keeps imports lazy (a family, an executor or a parser costs nothing until it is named)
and turns a wrong name into a message that lists the right ones.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from headrace.base.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of lazily imported attributes. `what` names the kind of thing in messages ("model
    family")."""

    def __init__(self, what: str, entries: Mapping[str, str]) -> None:
        self.what = what
        self._entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, target: str) -> None:
        """Adds `name -> "module:attribute"`; a name that is taken is refused."""
        if name in self._entries:
            raise ConfigError(f"{self.what} {name!r} is registered twice")
        self._entries[name] = target

    def load(self, name: str) -> T:
        """Imports and returns what `name` stands for; an unknown name lists the known ones."""
        if name not in self._entries:
            raise ConfigError(self._unknown(name))
        module, _, attribute = self._entries[name].partition(":")
        return cast(T, getattr(importlib.import_module(module), attribute))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown {self.what} {name!r}{hint} (known: {', '.join(sorted(self._entries))})"
