"""Sizes as people write them: "4GiB", "512MB", "32K", "25.6k".

Bytes: KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB and the bare letters k, m, g, t powers
of 1000. Counts (tokens, requests): k and m are powers of 1000, K and M of 1024. Durations: "5m",
"1h30m", or a number of seconds.
"""

from __future__ import annotations

import re

from headrace.base.errors import ConfigError

_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|m|s))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_COUNTS = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


def parse_bytes(text: str, *, field: str) -> int:
    """Bytes from a text such as "4GiB"."""
    match = _NUMBER.match(text)
    factor = _BYTES.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{field}: {text!r} is not a size (examples: 4GiB, 512MB)", field=field)
    return int(float(match[1]) * factor)


def parse_count(text: str, *, field: str) -> int:
    """A whole number from a text such as "32K" or "25.6k"."""
    match = _NUMBER.match(text)
    factor = _COUNTS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{field}: {text!r} is not a number (examples: 4096, 32K, 25.6k)", field=field
        )
    value = float(match[1]) * factor
    if value != int(value):
        raise ConfigError(f"{field}: {text!r} is not a whole number", field=field)
    return int(value)


def parse_duration(text: str, *, field: str) -> float:
    """Seconds from a text such as "1h30m" or "90"; it may be negative, as "-1" and "-5m" are."""
    sign, word = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"\d+(\.\d+)?", word):
        return sign * float(word)
    if _DURATION.fullmatch(word) is None:
        raise ConfigError(
            f"{field}: {text!r:.100} is not a duration (examples: 5m, 1h30m, 90, -1)", field=field
        )
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(word))


def show_bytes(count: float) -> str:
    """A size for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
