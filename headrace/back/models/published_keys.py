"""Keys of config.json files that were published with code of their own, under the names that others
use.

A row is a function of an architecture's config, which gives the keys to add. The config's own keys
stay, for the family to read what only it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.back.models.dense_keys import DENSE_KEYS
from headrace.back.models.encoder_keys import ENCODER_KEYS
from headrace.back.models.expert_keys import EXPERT_KEYS
from headrace.back.models.key_names import Keys
from headrace.back.models.media_keys import MEDIA_KEYS
from headrace.back.models.recurrent_keys import RECURRENT_KEYS
from headrace.base.config.hf import ConfigReader

ROWS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    **DENSE_KEYS,
    **EXPERT_KEYS,
    **RECURRENT_KEYS,
    **ENCODER_KEYS,
    **MEDIA_KEYS,
}
"""By the name of the architecture."""
UNNAMED: Mapping[str, str] = {"deepseek_vl_v2": "DeepseekVLV2ForCausalLM"}
"""By the `model_type`, where config.json files name no architecture."""


def in_common_keys(config: Mapping[str, Any], where: str = "config.json") -> Keys:
    """The config with the common keys besides, where its architecture has a row."""
    kind = config.get("model_type")
    if "architectures" not in config and isinstance(kind, str) and kind in UNNAMED:
        config = {**config, "architectures": [UNNAMED[kind]]}
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else None
    row = ROWS.get(named) if isinstance(named, str) else None
    return dict(config) if row is None else {**config, **row(ConfigReader(config, where))}
