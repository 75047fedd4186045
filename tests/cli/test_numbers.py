"""Every numeric flag of every command has bounds: a value outside them is refused with the flag, the
value and the limits, before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_type_hints

import msgspec
import pytest

from headrace.base.config.numbers import NumberType
from headrace.base.config.options import CommandLine, OptionField, _flatten, fields
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.cli.bench import ABOUT
from headrace.cli.main import COMMANDS, SUMMARIES

NAMES = [*(name for name in SUMMARIES if name != "bench"), *(f"bench {kind}" for kind in ABOUT)]
ALL = ("model", "kv", "scheduler", "device", "server")


class Parsed(Exception):
    """Carries a command's parser out of the command."""


def run(name: str, *words: str) -> int:
    first, *rest = name.split()
    return COMMANDS.load(first)([*rest, *words])


def actions_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """The arguments of a command, as it hands them to its parser."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parsed(parser._actions)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        try:
            run(name)
        except Parsed as parsed:
            return list(parsed.args[0])
    return []


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("env", "doctor")])
def test_every_numeric_flag_of_a_command_has_bounds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for action in actions_of(name, monkeypatch):
        assert action.type not in (int, float), f"{name} {action.option_strings}"
        if not isinstance(action.type, NumberType):
            continue
        (flag,) = action.option_strings
        kind = action.type
        assert kind.flag == flag and kind.least < kind.greatest < float("inf")
        outside = [f"{kind.least - 1:.0f}", f"{kind.greatest * 2 + 1:.0f}", "nan", "inf", "x"]
        outside += [f"{kind.least:.0f}"] if kind.above else []
        for value in outside:
            with pytest.raises(ConfigError, match=flag) as caught:
                run(name, f"{flag}={value}")
            assert value in caught.value.message
        assert kind(str(kind.greatest if not kind.whole else int(kind.greatest))) == kind.greatest


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "--count", "-1"),
        ("eval", "--count", "0"),
        ("eval", "--streams", "0"),
        ("eval", "--bar", "1.1"),
        ("plan", "--context", "-5"),
        ("bench throughput", "--num-requests", "0"),
        ("bench serve", "--rate", "0"),
        ("bench sweep", "--concurrency", "4,0"),
        ("bench sweep", "--rates", "1,nan"),
        ("bench latency", "--output-len", "1"),
        ("generate", "--temperature", "-3"),
        ("chat", "--top-p", "0"),
    ],
)
def test_what_passed_before_is_refused(words: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match=words[1]) as caught:
        run(words[0], *words[1:])
    assert "allowed: " in caught.value.message


def numeric_fields() -> list[OptionField]:
    return [f for f in fields() if f.is_number or f.is_float]


@pytest.mark.parametrize("option", numeric_fields(), ids=lambda option: str(option.name))
def test_every_number_of_the_tree_has_bounds(option: OptionField) -> None:
    group = get_type_hints(Options)[option.group]
    parts = list(_flatten(get_type_hints(group, include_extras=True)[option.name]))
    metas = [part for part in parts if isinstance(part, msgspec.Meta)]
    greatest = [one for m in metas for one in (m.le, m.lt) if one is not None]
    if not greatest:
        assert option.choices, f"{option.flag} has neither bounds nor choices"
        return
    line = CommandLine("test", "", groups=ALL)
    for value in ("-7", str(int(greatest[0]) * 2 + 1)):
        with pytest.raises(ConfigError, match=option.flag):
            line.parse([f"{option.flag}={value}"])
