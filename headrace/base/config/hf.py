"""Reading a checkpoint's JSON files: config.json, generation_config.json, tokenizer_config.json,
index files.

A file is read with a size limit, without duplicate keys, and as data only: nothing here imports,
evaluates or fetches what a file names. `ConfigReader` then asks for one key at a time with its
type, bounds and aliases, so that a wrong value is refused by file, key and value, and `unused()`
can tell which keys nobody understood. What a key means to a family is the family's business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast, overload

from headrace.base.errors import CheckpointError

MAX_JSON_BYTES: Final = 16 << 20
"""Of a config file. Real ones stay under 100 kB; a tokenizer.json or an index has its own limit."""

_Int = int
_Float = float
_Bool = bool
_Str = str
T = TypeVar("T")


class _Required:
    """The default of a key that must be there."""


REQUIRED: Final = _Required()


class ConfigReader:
    """One JSON object of a checkpoint, read key by key; `where` names file and section in messages.
    A key that is null counts as absent. Of a key and its aliases, in order, the first present is
    taken. CheckpointError: no value and no default, a wrong type, or outside the bounds."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self._asked: set[str] = set()
        self._sections: dict[str, ConfigReader] = {}

    def __contains__(self, key: object) -> _Bool:
        return isinstance(key, str) and self.raw.get(key) is not None

    @overload
    def int(
        self,
        key: _Str,
        default: _Int | _Required = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
        ge: _Int | None = None,
        le: _Int | None = None,
    ) -> _Int: ...
    @overload
    def int(
        self,
        key: _Str,
        default: None,
        *,
        aliases: Sequence[_Str] = (),
        ge: _Int | None = None,
        le: _Int | None = None,
    ) -> _Int | None: ...
    def int(
        self,
        key: _Str,
        default: _Int | _Required | None = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
        ge: _Int | None = None,
        le: _Int | None = None,
    ) -> _Int | None:
        """A whole number (32.0 counts as one, true does not), within `ge` and `le`."""

        def parse(value: Any) -> _Int | None:
            if isinstance(value, float) and value.is_integer():
                value = _Int(value)
            return value if _is_int(value) and _within(value, ge, le) else None

        return self._take(key, default, aliases, parse, "a whole number" + _bounds(ge, le))

    @overload
    def float(
        self,
        key: _Str,
        default: _Float | _Required = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
        ge: _Float | None = None,
        le: _Float | None = None,
    ) -> _Float: ...
    @overload
    def float(
        self,
        key: _Str,
        default: None,
        *,
        aliases: Sequence[_Str] = (),
        ge: _Float | None = None,
        le: _Float | None = None,
    ) -> _Float | None: ...
    def float(
        self,
        key: _Str,
        default: _Float | _Required | None = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
        ge: _Float | None = None,
        le: _Float | None = None,
    ) -> _Float | None:
        """A finite number within `ge` and `le`."""

        def parse(value: Any) -> _Float | None:
            number = _as_float(value)
            return number if number is not None and _within(number, ge, le) else None

        return self._take(key, default, aliases, parse, "a finite number" + _bounds(ge, le))

    @overload
    def bool(
        self, key: _Str, default: _Bool | _Required = REQUIRED, *, aliases: Sequence[_Str] = ()
    ) -> _Bool: ...
    @overload
    def bool(self, key: _Str, default: None, *, aliases: Sequence[_Str] = ()) -> _Bool | None: ...
    def bool(
        self,
        key: _Str,
        default: _Bool | _Required | None = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
    ) -> _Bool | None:
        """true or false; 0 and 1 are refused."""
        return self._take(key, default, aliases, _instance(_Bool), "true or false")

    @overload
    def str(
        self, key: _Str, default: _Str | _Required = REQUIRED, *, aliases: Sequence[_Str] = ()
    ) -> _Str: ...
    @overload
    def str(self, key: _Str, default: None, *, aliases: Sequence[_Str] = ()) -> _Str | None: ...
    def str(
        self,
        key: _Str,
        default: _Str | _Required | None = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
    ) -> _Str | None:
        """A text."""
        return self._take(key, default, aliases, _instance(_Str), "a text")

    @overload
    def choice(
        self,
        key: _Str,
        allowed: Iterable[_Str],
        default: _Str | _Required = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
    ) -> _Str: ...
    @overload
    def choice(
        self, key: _Str, allowed: Iterable[_Str], default: None, *, aliases: Sequence[_Str] = ()
    ) -> _Str | None: ...
    def choice(
        self,
        key: _Str,
        allowed: Iterable[_Str],
        default: _Str | _Required | None = REQUIRED,
        *,
        aliases: Sequence[_Str] = (),
    ) -> _Str | None:
        """One of the texts in `allowed`; an unknown variant is refused with the list of them."""
        names = tuple(allowed)

        def parse(value: Any) -> _Str | None:
            return value if isinstance(value, str) and value in names else None

        return self._take(key, default, aliases, parse, "one of " + ", ".join(sorted(names)))

    @overload
    def list(
        self,
        key: _Str,
        default: Sequence[T] | _Required = REQUIRED,
        *,
        of: type[T],
        aliases: Sequence[_Str] = (),
        length: _Int | None = None,
    ) -> tuple[T, ...]: ...
    @overload
    def list(
        self,
        key: _Str,
        default: None,
        *,
        of: type[T],
        aliases: Sequence[_Str] = (),
        length: _Int | None = None,
    ) -> tuple[T, ...] | None: ...
    def list(
        self,
        key: _Str,
        default: Sequence[T] | _Required | None = REQUIRED,
        *,
        of: type[T],
        aliases: Sequence[_Str] = (),
        length: _Int | None = None,
    ) -> tuple[T, ...] | None:
        """A list of int, float, str or bool, of exactly `length` items if that is given; returned
        as a tuple."""
        item = _ITEMS[of]

        def parse(value: Any) -> tuple[T, ...] | None:
            if not isinstance(value, list) or (length is not None and len(value) != length):
                return None
            items = tuple(item(entry) for entry in value)
            return None if None in items else items

        count = "" if length is None else f"{length} "
        wanted = f"a list of {count}{of.__name__}"
        return self._take(key, default, aliases, parse, wanted)

    def range(self, key: _Str, default: tuple[_Float, _Float]) -> tuple[_Float, _Float]:
        """A list of two numbers, the lower first. Either may be infinite: as JSON's extension
        `Infinity`, or as transformers writes it, {"__float__": "Infinity"}."""

        def parse(value: Any) -> tuple[_Float, _Float] | None:
            numbers = [_as_end(one) for one in value] if isinstance(value, list) else []
            good = len(numbers) == 2 and None not in numbers
            low, high = numbers if good else (None, None)
            if low is None or high is None or not low <= high:
                return None
            return low, high

        ends = self._take(key, default, (), parse, "a list of two numbers, the lower first")
        assert ends is not None
        return ends

    def ids(self, key: _Str, *, below: _Int | None = None) -> tuple[_Int, ...]:
        """Token ids given as one number, a list of them, or not at all; each at least 0 and less
        than `below`."""

        def parse(value: Any) -> tuple[_Int, ...] | None:
            numbers = value if isinstance(value, list) else [value]
            top = None if below is None else below - 1
            good = all(_is_int(one) and _within(one, 0, top) for one in numbers)
            return tuple(numbers) if good else None

        bound = "" if below is None else f" and less than {below}"
        wanted = f"a token id or a list of them, each at least 0{bound}"
        return self._take(key, (), (), parse, wanted) or ()

    def section(self, key: _Str, *, aliases: Sequence[_Str] = ()) -> ConfigReader | None:
        """The object under `key` as a reader of its own, None if absent; asked twice it is the same
        reader."""
        name = self._present(key, aliases)
        if name is None:
            return None
        if name not in self._sections:
            if not isinstance(self.raw[name], Mapping):
                raise self.wrong(name, "an object")
            self._sections[name] = ConfigReader(self.raw[name], f"{self.where}: {name}")
        return self._sections[name]

    def required_section(self, key: _Str, *, aliases: Sequence[_Str] = ()) -> ConfigReader:
        """`section`, for an object that must be there: CheckpointError names what lacks."""
        section = self._take(
            key, REQUIRED, aliases, lambda _: self.section(key, aliases=aliases), "an object"
        )
        assert section is not None
        return section

    def unused(self) -> tuple[_Str, ...]:
        """Keys nobody asked for, dotted into the sections that were opened, sorted."""
        own = [key for key in self.raw if key not in self._asked]
        for name, section in self._sections.items():
            own += [f"{name}.{key}" for key in section.unused()]
        return tuple(sorted(own))

    def wrong(self, key: _Str, allowed: _Str) -> CheckpointError:
        """The error for a value that is there and not allowed; for checks a family makes itself."""
        shown = _shown(self.raw.get(key))
        return CheckpointError(f"{self.where}: {key} is {shown}; it must be {allowed}", field=key)

    def _take(
        self,
        key: _Str,
        default: Any,
        aliases: Sequence[_Str],
        parse: Callable[[Any], T | None],
        wanted: _Str,
    ) -> T | None:
        name = self._present(key, aliases)
        if name is None:
            if isinstance(default, _Required):
                also = f" (or {', '.join(aliases)})" if aliases else ""
                message = f"{self.where}: {key}{also} is missing; it must be {wanted}"
                raise CheckpointError(message, field=key)
            # a list stands for the tuple that is parsed
            return cast("T | None", tuple(default) if isinstance(default, list) else default)
        parsed = parse(self.raw[name])
        if parsed is None:
            raise self.wrong(name, wanted)
        return parsed

    def _present(self, key: _Str, aliases: Sequence[_Str]) -> _Str | None:
        names = (key, *aliases)
        self._asked.update(names)
        return next((name for name in names if self.raw.get(name) is not None), None)


def read_json(path: Path, *, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`; too large, not an object, nested too deep or with duplicate keys:
    CheckpointError."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, or not a file")
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes; at most {limit} are read")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names it in messages."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(items)
        if len(document) != len(items):
            names = [key for key, _ in items]
            double = next(key for key in names if names.count(key) > 1)
            raise CheckpointError(f"{where}: the key {double!r} appears twice")
        return document

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must be a JSON object, not {_shown(value)}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_end(value: Any) -> float | None:
    """A finite or infinite number."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    return value if value in (math.inf, -math.inf) else _as_float(value)


def _within(value: float, ge: float | None, le: float | None) -> bool:
    return (ge is None or value >= ge) and (le is None or value <= le)


def _bounds(ge: float | None, le: float | None) -> str:
    parts = [f" of at least {ge}"] if ge is not None else []
    return "".join(parts + ([f" of at most {le}"] if le is not None else []))


def _instance(kind: type[T]) -> Callable[[Any], T | None]:
    return lambda value: value if isinstance(value, kind) else None


_ITEMS: dict[type[Any], Callable[[Any], Any]] = {
    int: lambda value: value if _is_int(value) else None,
    float: _as_float,
    str: _instance(str),
    bool: _instance(bool),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
