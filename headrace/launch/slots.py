"""Whether conversations may be saved (core/slots.py), and where."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headrace.base.config.resolved import DeviceSpec, KVSpec
from headrace.base.config.tree import KVOptions
from headrace.base.config.units import parse_bytes
from headrace.base.errors import ConfigError
from headrace.launch.model_facts import ModelFacts

FIELD = "slot_save_path"


def with_slots(
    spec: KVSpec, options: KVOptions, model: ModelFacts, device_spec: DeviceSpec
) -> KVSpec:
    """The cache's spec with the folder for conversations; ConfigError where none can be saved."""
    if options.slot_save_path is None:
        return spec
    folder = Path(options.slot_save_path).expanduser()
    reason = None
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{options.slot_save_path!r} is no folder that can be written to"
    elif device_spec.executor == "null":
        reason = "--executor null computes nothing"
    elif model.head != "lm":
        reason = f"{model.architecture} generates no text"
    elif not spec.prefix_caching:
        reason = "a conversation is saved from the prefix cache, which is off (--prefix-caching)"
    if reason is not None:
        raise ConfigError(f"--slot-save-path: {reason}", field=FIELD)
    return msgspec.structs.replace(
        spec,
        slot_save_path=str(folder.absolute()),
        slot_save_bytes=parse_bytes(options.slot_save_bytes, field="--slot-save-bytes"),
    )
