"""What MLX writes under `quantization` of config.json; config_files.py has it under
`quantization_config`, with a method."""

from __future__ import annotations

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Numbers,
    Rule,
    StoredQuantization,
    bits_of,
)

_FLOATS = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Mode -> the bits of its numbers, and the inputs that share a scale."""


def mlx(config: ConfigReader) -> StoredQuantization:
    """MLX: one way for all modules, and modules by name that differ or (false) are plain."""
    rules = []
    for name, written in config.raw.items():
        if written is False:
            rules.append(Rule(targets=(name,), numbers=None))
        elif isinstance(written, dict):
            entry = config.section(name)
            assert entry is not None
            rules.append(Rule(targets=(name,), numbers=_numbers(entry)))
    whole = Rule(targets=(EVERY,), numbers=_numbers(config))
    return StoredQuantization(method="mlx", rules=(*rules, whole))


def _numbers(config: ConfigReader) -> Numbers:
    """Integers with a scale and a float that is added ("affine"), or floats of 4 and 8 bits."""
    mode = config.choice("mode", ("affine", *_FLOATS), "affine")
    if mode == "affine":
        size = config.int("group_size", ge=1)
        bits = bits_of(config, (2, 3, 4, 5, 6, 8))
        return Numbers(arrangement="mlx", bits=bits, group=(1, size), signed=False)
    bits, size = _FLOATS[mode]
    if config.int("bits", bits) != bits:
        raise config.wrong("bits", f"{bits}, of {mode}")
    if config.int("group_size", size) != size:
        raise config.wrong("group_size", f"{size}, of {mode}")
    return Numbers(arrangement=f"mlx-{mode}", bits=bits, group=(1, size))
