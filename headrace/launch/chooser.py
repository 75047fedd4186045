"""Collects what is decided for the user while options are resolved."""

from __future__ import annotations

from typing import Any

from headrace.base.config.resolved import Decision


class Chooser:
    """Collects the decisions. `pick` returns the user's value, or records and returns the one
    chosen for "auto"."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def pick(self, field: str, requested: Any, chosen: Any, why: str) -> Any:
        if requested != "auto":
            return requested
        self.note(field, "auto", chosen, why)
        return chosen

    def note(self, field: str, requested: Any, chosen: Any, why: str) -> None:
        self.decisions.append(Decision(field, str(requested), str(chosen), why))
