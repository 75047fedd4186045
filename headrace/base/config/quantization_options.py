"""Which weights are quantized while they load, by part of the model: `--quantization` for all,
`--quantization-config` for parts that differ."""

from __future__ import annotations

from typing import Literal

import msgspec

SchemeName = Literal[
    "none",
    "int8",
    "int8-g32",
    "int8-g64",
    "int8-g128",
    "fp8",
    "fp8-tensor",
    "fp8-block",
    "mxfp8",
    "int4",
    "int4-g64",
    "int4-g128",
    "int4-asym",
    "int4-asym-g64",
    "int4-asym-g128",
    "mxfp4",
    "nvfp4",
]
WEIGHT_BITS = {
    "int8": 8.0, "int8-g32": 8.5, "int8-g64": 8.25, "int8-g128": 8.125,
    "fp8": 8.0, "fp8-tensor": 8.0, "fp8-block": 8.25, "mxfp8": 9.0,
    "int4": 4.5, "int4-g64": 4.25, "int4-g128": 4.125,
    "int4-asym": 5.0, "int4-asym-g64": 4.5, "int4-asym-g128": 4.25,
    "mxfp4": 4.25, "nvfp4": 5.0,
}  # fmt: skip
"""Bits of a weight with its share of scales, in memory."""
SCHEME_ALIASES = {
    "fp8_per_tensor": "fp8-tensor",
    "fp8_per_channel": "fp8",
    "ptpc_fp8": "fp8",
    "fp8_per_block": "fp8-block",
    "int8_per_channel_weight_only": "int8",
    "nvfp4_per_token": "nvfp4",
}
"""Names of other servers."""


class QuantizationParts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Schemes of parts that differ from the rest. `linear`: linear layers; `moe`: routed and shared
    experts; `head`: the output head, with a tied embedding on CPUs; `embedding`: an untied one.
    None: as the rest, which on GPUs leaves head and embedding plain. `ignore`: modules that stay
    plain, with all below them; "*" stands for any characters."""

    linear: SchemeName | None = None
    moe: SchemeName | None = None
    head: SchemeName | None = None
    embedding: SchemeName | None = None
    ignore: tuple[str, ...] = ()

    def of(self, part: str) -> str | None:
        """What is stated for a part."""
        stated: dict[str, str | None] = {
            "linear": self.linear,
            "moe": self.moe,
            "head": self.head,
            "embedding": self.embedding,
        }
        return stated[part]
