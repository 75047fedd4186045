"""A JSON document as a typed struct: types and bounds are checked by msgspec, and a breach becomes
an InvalidRequest that names the field, the value given and what is allowed. Unknown fields are
ignored."""

from __future__ import annotations

import logging
import math
import re
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest

Name = Annotated[str, Meta(max_length=256)]


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


Count = Annotated[int, Meta(ge=0, lt=2**31)]


MAX_SHOWN_CHARS = 200


MAX_ENTRIES_TRIED = 4096


R = TypeVar("R", bound=msgspec.Struct)


log = logging.getLogger(__name__)


def typed(document: Any, kind: type[R]) -> R:
    """A request of any dialect: the document with its types and bounds checked; unknown fields are
    ignored."""
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    if log.isEnabledFor(logging.DEBUG):
        ignored = sorted(document.keys() - set(kind.__struct_fields__))
        log.debug("fields that are not known are ignored: %s", [name[:64] for name in ignored[:32]])
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), document, kind) from None


_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)


_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")


def _named(message: str, document: dict[str, Any], kind: type[msgspec.Struct]) -> InvalidRequest:
    match = _WHERE.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix("$")
    if (entry := _wrong_entry(document, path, kind)) is not None:
        return entry
    missing = _MISSING.search(what)
    if missing:
        field = f"{path.removeprefix('.')}.{missing['name']}".strip(".")
        return InvalidRequest(f"{field}: this field is required", field=field)
    field = path.removeprefix(".").replace("[...]", "")
    allowed = what[:1].lower() + what[1:]
    if what.startswith("Invalid enum value") and (words := _words(kind, path)):
        allowed = f"allowed: {', '.join(map(repr, words))}"
    return InvalidRequest(f"{field}: {allowed}; got {_shown(document, path)}", field=field)


def _words(kind: Any, path: str) -> list[Any]:
    """What a field of fixed words may be."""
    forms = [kind]
    for name, _ in _STEP.findall(path):
        forms = [part for form in forms for part in _parts(form)]
        if name:
            structs = [form for form in forms if name in getattr(form, "__struct_fields__", ())]
            forms = [get_type_hints(form, include_extras=True)[name] for form in structs]
    fixed = [part for form in forms for part in _parts(form) if get_origin(part) is Literal]
    return list(dict.fromkeys(word for form in fixed for word in get_args(form)))


def _parts(form: Any) -> list[Any]:
    """A type, and those that it is put together from."""
    inner = [] if get_origin(form) is Literal else get_args(form)
    return [form, *(part for each in inner for part in _parts(each))]


def _wrong_entry(
    document: dict[str, Any], path: str, kind: type[msgspec.Struct]
) -> InvalidRequest | None:
    """The error of the one entry of an object field that is wrong, which msgspec does not name."""
    field = path.removeprefix(".").removesuffix("[...]")
    entries = document.get(field)
    if not isinstance(entries, dict) or field not in kind.__struct_fields__:
        return None
    form = get_type_hints(kind, include_extras=True)[field]
    for key, value in islice(entries.items(), MAX_ENTRIES_TRIED):
        try:
            msgspec.convert({key: value}, form)
        except msgspec.ValidationError as error:
            at = f"{field}[{key[:64]!r}]"
            match = _WHERE.match(str(error))
            what = match["what"] if match is not None else str(error)
            what = what[:1].lower() + what[1:]
            return InvalidRequest(f"{at}: {what}; got {_shown(value, '')}", field=field)
    return None


def _shown(document: Any, path: str) -> str:
    """The value at `path`, as JSON, cut to 200 characters; a container only by its kind and
    size."""
    value = document
    for name, index in _STEP.findall(path):
        if isinstance(value, dict) and name:
            value = value.get(name)
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'an array'} with {len(value)} entries"
    if isinstance(value, float) and math.isinf(value):
        return f"a number {'below -' if value < 0 else 'above '}1.8e308"
    text = msgspec.json.encode(value).decode() if not isinstance(value, int) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
