"""What the table of features (parallel_modes.py) is made of: rows, and how one goes with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headrace.base.config.resolved import EngineSpec, TextSpec
from headrace.base.config.tree import Options
from headrace.launch.model_facts import ModelFacts


class Start(NamedTuple):
    """What is about to be started."""

    options: Options
    model: ModelFacts
    engine: EngineSpec
    text: TextSpec


Wanted = Callable[[Start], bool]


def never(start: Start) -> bool:
    """Requests ask for it, not the start."""
    return False


@dataclass(frozen=True)
class ShownPair:
    """The pair works: `test` (file::function below tests/) shows it. `note`: what is to know."""

    test: str
    note: str = ""


@dataclass(frozen=True)
class RefusedPair:
    """The pair is refused: at start, or when a request asks for it."""

    why: str


@dataclass(frozen=True)
class UnshownPair:
    """The pair is taken, and no test shows it: why."""

    why: str


Entry = ShownPair | RefusedPair | UnshownPair


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row of the table. `option`: as it is typed, or what it is in words. `wanted`: whether a
    start asks for it. `beside`: how it goes with each mode, by the mode's name."""

    name: str
    option: str
    wanted: Wanted = never
    beside: Mapping[str, Entry] = dataclasses.field(default_factory=dict)

    @property
    def field(self) -> str | None:
        """The name of its first option; None where a model asks for it."""
        flag = self.option.partition(" ")[0].rstrip(",")
        return flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else None
