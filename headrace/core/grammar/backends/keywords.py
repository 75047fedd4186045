"""What of JSON schema the xgrammar backend holds. Other keywords it would leave out silently, so
they are refused.

Texts about a value are fine anywhere. A value that is said to be one of several (`anyOf`, `enum`,
...) takes nothing beside that but such texts, because the library looks at one of both only.
"""

from __future__ import annotations

from typing import Any

from headrace.base.errors import InvalidRequest

TEXTS = frozenset({
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated",
    "readOnly", "writeOnly", "$defs", "definitions",
})  # fmt: skip
CHOICES = frozenset({"anyOf", "enum", "const", "$ref", "allOf"})
HELD = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
})  # fmt: skip
_LENGTHS = ("minLength", "maxLength")


def check_keywords(schema: Any) -> None:
    """Raises InvalidRequest for the first keyword that would not be held."""
    if not isinstance(schema, dict):
        return
    stated = schema.keys() - TEXTS
    if unknown := sorted(stated - CHOICES - HELD):
        raise InvalidRequest(f"the xgrammar backend does not hold the keyword {unknown[0]!r}")
    choices = sorted(stated & CHOICES)
    beside = sorted(stated - {*choices[:1], "type"})
    if choices and beside:
        raise InvalidRequest(
            f"the xgrammar backend does not hold {beside[0]!r} beside {choices[0]!r}"
        )
    texts = ["pattern" in stated, "format" in stated, any(name in stated for name in _LENGTHS)]
    if sum(texts) > 1:
        raise InvalidRequest("the xgrammar backend holds one of pattern, format and lengths only")
    if len(schema.get("allOf", ())) > 1:
        raise InvalidRequest("the xgrammar backend does not hold 'allOf' of several schemas")
    _check_inner(schema)


def _check_inner(schema: dict[str, Any]) -> None:
    for name in ("properties", "$defs", "definitions"):
        for inner in schema.get(name, {}).values():
            check_keywords(inner)
    for name in ("additionalProperties", "items"):
        check_keywords(schema.get(name))
    for name in ("anyOf", "allOf", "prefixItems"):
        for inner in schema.get(name, ()):
            check_keywords(inner)
