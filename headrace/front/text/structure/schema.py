"""JSON schemas as people send them: bounded before any work, refused with a pointer, and written
anew for the compiler.

What the grammar could not hold is refused by name, never ignored; annotations and unknown keywords
say nothing about a value and are left alone. A format that the compiler does not know is an
annotation too (JSON Schema 2020-12, 7.2.1).
"""

from __future__ import annotations

import json
from typing import Any

from headrace.base.errors import InvalidRequest
from headrace.front.text.structure.formats import PATTERNS
from headrace.front.text.structure.regex import portable

MAX_SCHEMA_BYTES = 128 * 1024
MAX_DEPTH = 64
MAX_SCHEMAS = 4096
MAX_VALUES = 4096
MAX_PATTERN_CHARS = 4096
MAX_NAME_CHARS = 256

_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMATS = frozenset(
    [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "unknown",
    ]
)
_REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def checked_schema(schema: Any, *, field: str, close_objects: bool = False) -> str:
    """The schema as JSON text for the compiler. `given` is an object, true, or either as JSON text;
    `close_objects`: objects have no properties but the named ones unless they say so."""
    if isinstance(schema, str):
        schema = _parsed(schema, field)
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{field}: a JSON schema is an object, not {_kind(schema)}", field=field
        )
    check_size(schema, field=field, most=MAX_SCHEMA_BYTES)
    walk = _Walk(field, close_objects=close_objects)
    return json.dumps(walk.schema(schema, ""), ensure_ascii=False)


def check_size(document: Any, *, field: str, most: int) -> None:
    """Refuses a document that is nested too deeply or too large, without recursion."""
    size, level = 0, [document]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                size += sum(len(key) + 4 for key in value)
                deeper += value.values()
            elif isinstance(value, list):
                size += 2 * len(value)
                deeper += value
            else:
                size += len(value) if isinstance(value, str) else 8
        if size > most:
            raise InvalidRequest(f"{field}: more than {most} bytes", field=field)
        if not deeper:
            return
        level = deeper
    raise InvalidRequest(f"{field}: nested more than {MAX_DEPTH} levels deep", field=field)


def _parsed(text: str, field: str) -> Any:
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"{field}: {len(text)} characters; {MAX_SCHEMA_BYTES} allowed", field=field
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field}: the text is not JSON", field=field) from None


class _Walk:
    """Goes through one schema, checks it and writes it anew."""

    def __init__(self, field: str, *, close_objects: bool) -> None:
        self._field = field
        self._close_objects = close_objects
        self._num_schemas = 0
        self._num_values = 0

    def schema(self, schema: Any, at: str) -> Any:
        """One schema; `at` is its JSON pointer."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise self._wrong("", f"more than {MAX_SCHEMAS} schemas in it")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._wrong(at, f"a schema is an object or a boolean, not {_kind(schema)}")
        for name in _REFUSED:
            if name in schema:
                raise self._wrong(f"{at}/{name}", "this keyword is not supported")
        if schema.get("uniqueItems") is True:
            raise self._wrong(f"{at}/uniqueItems", "true is not supported")
        self._check_plain(schema, at)
        rewritten = {name: value for name, value in schema.items() if name not in _DROPPED}
        if "pattern" in schema:
            rewritten["pattern"] = portable(schema["pattern"])
        elif schema.get("format") in PATTERNS:
            rewritten["pattern"] = portable(PATTERNS[rewritten.pop("format")])
        if self._is_unknown_format(rewritten):
            del rewritten["format"]
        for name in _MAPS:
            if name in schema:
                rewritten[name] = self._map(schema[name], f"{at}/{name}")
        for name in _LISTS:
            if name in schema:
                rewritten[name] = self._list(schema[name], f"{at}/{name}")
        for name in _SINGLES:
            if name in schema:
                rewritten[name] = self._single(schema[name], f"{at}/{name}")
        if self._close_objects and "properties" in rewritten:
            rewritten.setdefault("additionalProperties", False)
        return rewritten

    def _map(self, schemas: Any, at: str) -> dict[str, Any]:
        if not isinstance(schemas, dict):
            raise self._wrong(at, f"must be an object of schemas, not {_kind(schemas)}")
        rewritten = {}
        for name, schema in schemas.items():
            if len(name) > MAX_NAME_CHARS:
                raise self._wrong(at, f"a name of more than {MAX_NAME_CHARS} characters")
            rewritten[name] = self.schema(schema, f"{at}/{_escaped(name)}")
        return rewritten

    def _list(self, schemas: Any, at: str) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            raise self._wrong(at, "must be a list of at least one schema")
        return [self.schema(schema, f"{at}/{i}") for i, schema in enumerate(schemas)]

    def _single(self, schema: Any, at: str) -> Any:
        return self._list(schema, at) if isinstance(schema, list) else self.schema(schema, at)

    def _check_plain(self, schema: dict[str, Any], at: str) -> None:
        self._check_type(schema, at)
        if "enum" in schema:
            self._check_enum(schema["enum"], f"{at}/enum")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._wrong(f"{at}/required", "must be a list of names")
        for name in _COUNTS:
            value = schema.get(name, 0)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise self._wrong(f"{at}/{name}", "must be a number of at least 0")
        for name in _NUMBERS:
            value = schema.get(name, 1)
            if not isinstance(value, int | float) or (isinstance(value, bool) and "ex" not in name):
                raise self._wrong(f"{at}/{name}", "must be a number")
        self._check_texts(schema, at)

    def _check_type(self, schema: dict[str, Any], at: str) -> None:
        types = schema.get("type", [])
        for kind in types if isinstance(types, list) else [types]:
            if kind not in _TYPES:
                raise self._wrong(
                    f"{at}/type", f"{str(kind)[:40]!r} is none of {', '.join(_TYPES)}"
                )

    def _check_enum(self, values: Any, at: str) -> None:
        if not isinstance(values, list) or not values:
            raise self._wrong(at, "must be a list of at least one value")
        self._num_values += len(values)
        if self._num_values > MAX_VALUES:
            raise self._wrong(at, f"more than {MAX_VALUES} values in the whole schema")

    def _check_texts(self, schema: dict[str, Any], at: str) -> None:
        pattern, reference = schema.get("pattern", ""), schema.get("$ref", "#")
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
            raise self._wrong(
                f"{at}/pattern", f"must be a text of at most {MAX_PATTERN_CHARS} characters"
            )
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._wrong(f"{at}/$ref", "only references into this schema (#/...) are followed")
        if not isinstance(schema.get("format", ""), str):
            raise self._wrong(f"{at}/format", "must be a text")

    def _is_unknown_format(self, schema: dict[str, Any]) -> bool:
        return "format" in schema and schema["format"] not in _FORMATS

    def _wrong(self, pointer: str, what: str) -> InvalidRequest:
        where = f"{self._field}:{pointer[:200]}" if pointer else self._field
        return InvalidRequest(f"{where}: {what}", field=self._field)


# Words about the schema, of no use to a compiler; some vendors' keywords would even change what it
# does.
_DROPPED = frozenset(
    ["title", "description", "default", "examples", "$comment", "deprecated", "x-guidance"]
)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")
