"""Values of a config.json under other names, for the tables of published_keys.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.config.hf import ConfigReader

Keys = dict[str, Any]


def called(config: ConfigReader, names: Mapping[str, str]) -> Keys:
    """The values under the keys of `names`, under the keys that these stand for."""
    return {ours: config.raw[theirs] for theirs, ours in names.items() if theirs in config}
