"""The command line, the YAML file and docs/CONFIG.md, all generated from the configuration tree.

Four spellings reach the same field: `--max-model-len 8K`, `--model.max_model_len 8K`, `--model
'{"max_model_len": 8192}'` and a YAML file with either nested or flat keys. Later words win over
earlier ones, the command line over the file.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import types
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from headrace.base.config.numbers import NumberType
from headrace.base.config.quantization_options import SCHEME_ALIASES
from headrace.base.config.tree import Options
from headrace.base.config.units import parse_count
from headrace.base.errors import ConfigError

_MAX_YAML_BYTES = 1 << 20
# Short spellings people use; the tree holds the long one.
_SHORT = {
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"},
    "quantization": SCHEME_ALIASES,
}


class OptionField(msgspec.Struct, frozen=True, kw_only=True):
    """One option: where it lives in the tree, how it is typed and what it means."""

    group: str
    name: str
    doc: str
    default: object
    choices: tuple[str, ...]
    is_bool: bool
    is_tuple: bool
    is_number: bool
    is_float: bool
    is_optional: bool
    is_json: bool

    @property
    def flag(self) -> str:
        """The flag, such as --max-model-len."""
        return "--" + self.name.replace("_", "-")


def _flatten(hint: Any) -> Iterator[Any]:
    """The plain types and Meta objects inside Annotated and unions."""
    if get_origin(hint) is Annotated:
        yield from _flatten(get_args(hint)[0])
        yield from get_args(hint)[1:]
    elif get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _flatten(part)
    else:
        yield hint


def _read_field(group: str, info: msgspec.structs.FieldInfo, hint: Any) -> OptionField:
    parts = list(_flatten(hint))
    docs = [p.description for p in parts if isinstance(p, msgspec.Meta) and p.description]
    assert docs, f"{group}.{info.name} has no description"
    choices = [c for p in parts if get_origin(p) is Literal for c in get_args(p)]
    return OptionField(
        group=group,
        name=info.name,
        doc=docs[-1],
        default=info.default,
        choices=tuple(str(c) for c in choices) if set(map(str, choices)) != {"auto"} else (),
        is_bool=bool in parts,
        is_tuple=any(get_origin(p) is tuple for p in parts),
        is_number=int in parts or any(isinstance(c, int) for c in choices),
        is_float=float in parts,
        is_optional=type(None) in parts,
        is_json=any(isinstance(p, type) and issubclass(p, msgspec.Struct) for p in parts),
    )


@cache
def fields() -> tuple[OptionField, ...]:
    """Every option, in the order of the tree. Names are unique over all groups, so that flags can
    be flat. Read once: a start asks for them four times, 15 ms each."""
    options = []
    for group in msgspec.structs.fields(Options):
        hints = get_type_hints(group.type, include_extras=True)
        for info in msgspec.structs.fields(group.type):
            options.append(_read_field(group.name, info, hints[info.name]))
    names = [f.name for f in options]
    assert len(set(names)) == len(names), "two options share a name"
    return tuple(options)


def _parse_text(option: OptionField, text: str, spelled: str) -> object:
    """The value a flag's text stands for, before the tree checks it."""
    if option.is_tuple:
        return [part for part in text.split(",") if part]
    if option.is_number and text == "-1":
        return -1
    if option.is_number and text not in option.choices and text not in ("auto", "none"):
        return parse_count(text, field=spelled)
    if option.is_number and text in option.choices and text.isdigit():
        return int(text)
    if option.is_float and text not in ("auto", "none"):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{spelled}: {text!r} is not a number", field=spelled) from None
    if text == "none" and option.is_optional:
        return None
    if option.is_json:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{spelled}: not JSON ({error})", field=spelled) from None
    return text


class _Parser(argparse.ArgumentParser):
    """argparse with errors of ours, and the nearest flag named when one is unknown."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class CommandLine:
    """The options of the tree as flags of one command, plus what that command adds itself through
    `parser`: `own` are names of options that it means otherwise."""

    def __init__(
        self, prog: str, description: str, *, groups: Sequence[str], own: Sequence[str] = ()
    ) -> None:
        self.parser = _Parser(
            prog=prog, description=description, allow_abbrev=False, add_help=False
        )
        self.parser.add_argument("--help", "-h", nargs="?", const="", metavar="WORD")
        self.parser.set_defaults(config=None)
        if groups:
            self.parser.add_argument("--config", metavar="FILE", help="YAML file with options")
        self._fields = [f for f in fields() if f.group in groups and f.name not in own]
        self._groups = tuple(groups)
        self._words: list[tuple[OptionField | str, str, object]] = []
        for option in self._fields:
            self._add(option)
        for group in groups:
            self.parser.add_argument(
                f"--{group}-json", dest=argparse.SUPPRESS, action=self._keep(group)
            )

    def _keep(self, target: OptionField | str) -> type[argparse.Action]:
        typed = self._words

        class Keep(argparse.Action):
            def __call__(
                self, parser: Any, namespace: Any, values: Any, flag: str | None = None
            ) -> None:
                typed.append((target, flag or "", values))

        return Keep

    def _add(self, option: OptionField) -> None:
        names = [option.flag, f"--{option.group}.{option.name}"]
        if option.is_bool:
            names += ["--no-" + option.flag[2:]]
        self.parser.add_argument(
            *names,
            dest=argparse.SUPPRESS,
            action=self._keep(option),
            nargs=0 if option.is_bool else None,
            metavar=option.name.upper(),
        )

    def add_number(
        self,
        flag: str,
        help_text: str,
        *,
        default: float | None,
        least: float,
        greatest: float,
        whole: bool = True,
        above: bool = False,
    ) -> None:
        """A numeric flag of the command's own, with its bounds (see NumberType)."""
        self.parser.add_argument(
            flag,
            type=NumberType(flag=flag, least=least, greatest=greatest, whole=whole, above=above),
            default=default,
            help=help_text if default is None else f"{help_text} [{default:g}]",
        )

    @property
    def flags(self) -> dict[str, bool]:
        """Every flag of the command, as it may be typed, and whether a value follows it."""
        actions = self.parser._option_string_actions
        return {flag: action.nargs is None for flag, action in actions.items()}

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, Options]:
        """The command's own namespace and the tree; ConfigError for anything unknown or out of
        range."""
        self._words.clear()
        own, unknown = self.parser.parse_known_args(_join_json_groups(argv, self._groups))
        if own.help is not None:
            print(self.help_text(own.help))
            raise SystemExit(0)
        if unknown:
            raise ConfigError(self._unknown(unknown[0]))
        values = _read_yaml(Path(own.config)) if own.config else {}
        for target, flag, typed in self._words:
            self._apply(values, target, flag, typed)
        return own, build(values)

    def _apply(
        self,
        values: dict[str, dict[str, object]],
        target: OptionField | str,
        flag: str,
        typed: object,
    ) -> None:
        if isinstance(target, str):
            try:
                document = json.loads(str(typed))
            except json.JSONDecodeError as error:
                raise ConfigError(f"--{target}: not JSON ({error})", field=f"--{target}") from error
            values.setdefault(target, {}).update(document)
        elif target.is_bool:
            values.setdefault(target.group, {})[target.name] = not flag.startswith("--no-")
        else:
            parsed = _parse_text(target, str(typed), flag)
            slot = values.setdefault(target.group, {})
            previous = slot.get(target.name) if target.is_tuple else None
            slot[target.name] = (
                [*previous, *parsed]
                if isinstance(previous, list) and isinstance(parsed, list)
                else parsed
            )

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; see --help"
        known = [s for action in self.parser._actions for s in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.5)
        return f"unknown option {word}" + (f"; did you mean {near[0]}?" if near else "; see --help")

    def help_text(self, word: str) -> str:
        """Help: everything ("" or "all"), one group, one flag, or the options whose text holds
        `word`."""
        own = [a for a in self.parser._actions if a.help and a.dest not in ("help",)]
        places = "".join(f" [{a.metavar}]" for a in own if not a.option_strings)
        usage = f"usage: {self.parser.prog}{places} [options]"
        lines = [usage, "", self.parser.description or "", ""]
        if word in ("", "all"):
            names = [", ".join(a.option_strings) or str(a.metavar) for a in own]
            lines += [f"  {n:34} {a.help}" for n, a in zip(names, own, strict=True)] + [""]
        for group in self._groups:
            chosen = [f for f in self._fields if f.group == group and _matches(f, word)]
            if chosen:
                lines += [f"{group}:", *(_help_line(f) for f in chosen), ""]
        return "\n".join(lines)


def _matches(option: OptionField, word: str) -> bool:
    wanted = word.lstrip("-").replace("_", "-").lower()
    return wanted in ("", "all", option.group) or wanted in f"{option.flag} {option.doc}".lower()


def _help_line(option: OptionField) -> str:
    shown = f"--[no-]{option.flag[2:]}" if option.is_bool else option.flag
    if option.choices:
        shown += f" {{{'|'.join(option.choices)}}}"
    return f"  {shown:34} {option.doc} [{show_default(option)}]"


def show_default(option: OptionField) -> str:
    """The default as it would be typed."""
    if option.default in (None, (), ""):
        return "none"
    return str(option.default).lower() if option.is_bool else str(option.default)


def _join_json_groups(argv: Sequence[str], groups: Sequence[str]) -> list[str]:
    """`--scheduler {...}` means the whole group as JSON; `--model NAME` stays the model's flag."""
    joined = list(argv)
    for i, word in enumerate(joined[:-1]):
        if word.startswith("--") and word[2:] in groups and joined[i + 1].lstrip().startswith("{"):
            joined[i] = f"{word}-json"
    return joined


def _read_yaml(path: Path) -> dict[str, dict[str, object]]:
    """The tree's values from a YAML file with nested or flat keys. Options of groups that a command
    does not use are allowed, so that one file serves `headrace serve` and `headrace plan`."""
    document = load_yaml(path, flag="--config") or {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of options", field="--config")
    return nested_values(document, source=str(path))


def load_yaml(path: Path, *, flag: str) -> object:
    """The document of a YAML file that `flag` names; ConfigError if it cannot be read."""
    try:
        if path.stat().st_size > _MAX_YAML_BYTES:
            raise ConfigError(f"{flag}: {path} is larger than {_MAX_YAML_BYTES} bytes", field=flag)
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error}", field=flag) from error


def nested_values(document: dict[Any, Any], *, source: str) -> dict[str, dict[str, object]]:
    """The tree's values from a mapping with nested or flat keys; `source` is named in errors."""
    by_name = {f.name: f for f in fields()}
    values: dict[str, dict[str, object]] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        is_one_option = name in by_name and by_name[name].is_json
        if isinstance(value, dict) and not is_one_option:
            nested = {str(k).replace("-", "_"): v for k, v in value.items()}
            values.setdefault(name, {}).update(
                {k: _yaml_value(by_name.get(k), v) for k, v in nested.items()}
            )
        elif name in by_name:
            option = by_name[name]
            values.setdefault(option.group, {})[name] = _yaml_value(option, value)
        else:
            near = difflib.get_close_matches(name, by_name, n=1)
            raise ConfigError(
                f"{source}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return values


def _yaml_value(option: OptionField | None, value: object) -> object:
    """A value of the file; a number may be written as on the command line (8K)."""
    if option is not None and option.is_number and isinstance(value, str):
        return _parse_text(option, value, option.name)
    return value


def build(values: dict[str, dict[str, object]]) -> Options:
    """The checked tree from nested values; unknown groups and keys are refused by name."""
    by_group: dict[str, list[str]] = {}
    for option in fields():
        by_group.setdefault(option.group, []).append(option.name)
    for group, members in values.items():
        if group not in by_group:
            raise ConfigError(f"unknown group of options {group!r} (known: {', '.join(by_group)})")
        for name in members:
            if name not in by_group[group]:
                near = difflib.get_close_matches(name, by_group[group], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{group}: unknown option {name!r}{hint}", field=name)
    try:
        return msgspec.convert({g: _spell_out(m) for g, m in values.items()}, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), values)) from error


def _spell_out(members: dict[str, object]) -> dict[str, object]:
    """A group's values with short spellings written out."""
    return {n: _SHORT[n].get(str(v), v) if n in _SHORT else v for n, v in members.items()}


def _explain(message: str, values: dict[str, dict[str, object]]) -> str:
    """msgspec's message with the flag and the value as the user typed them."""
    text, _, path = message.rpartition(" - at `$.")
    group, _, name = path.rstrip("`").partition(".")
    name = name.partition("[")[0]
    if name not in values.get(group, {}):
        return message
    option = next(f for f in fields() if f.name == name)
    if "matching regex" in text:  # only sizes are so described
        return f"{option.flag}: {values[group][name]!r} is no size such as 4GiB. {option.doc}"
    allowed = f" (one of: {', '.join(option.choices)})" if option.choices else ""
    return f"{option.flag}: {values[group][name]!r}: {text}{allowed}"


def config_page() -> str:
    """docs/CONFIG.md."""
    lines = ["# Options", "", "Generated by `make docs` from headrace/base/config/tree.py.", ""]
    for group in msgspec.structs.fields(Options):
        lines += [f"## {group.name}", "", inspect.getdoc(group.type) or "", ""]
        lines += ["| flag | default | meaning |", "|---|---|---|"]
        for f in (f for f in fields() if f.group == group.name):
            choices = f" One of: {', '.join(f.choices)}." if f.choices else ""
            lines.append(f"| `{f.flag}` | {show_default(f)} | {f.doc}{choices} |")
        lines.append("")
    return "\n".join(lines)
