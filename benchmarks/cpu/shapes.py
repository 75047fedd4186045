"""The models that are measured, a row each, and what their sizes say: bytes a step reads, operations of a prompt."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parents[1] / "demo" / "model"
BYTES_PER_WEIGHT = {"bf16": 2.0, "int8": 1.002, "int4": 0.5625}
"""With the scales: one per output, one per 32 inputs."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`folder` has the config.json, `checkpoint` gets or has weights; `loads`: streams -> tokens in, tokens out of a
    decode; `prompts`: their lengths in tokens."""

    name: str
    title: str
    folder: Path
    checkpoint: Path
    loads: dict[int, tuple[int, int]]
    prompts: tuple[int, ...] = (512, 2048)

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.json").read_text()))

    @property
    def head(self) -> int:
        """Weights of the output head, which is the embedding too."""
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def layers(self) -> int:
        """Weights of all layers."""
        beside_kv, kv = self._layer
        return int(self.config["num_hidden_layers"] * (beside_kv + kv))

    @property
    def _layer(self) -> tuple[int, int]:
        """Weights of one layer: all but those that make keys and values, and these."""
        c = self.config
        rest = 2 * c["num_attention_heads"] * c["head_dim"] + 3 * c["intermediate_size"]
        kv = 2 * c["num_key_value_heads"] * c["head_dim"]
        return c["hidden_size"] * rest, c["hidden_size"] * kv

    def read_bytes(self, precision: str) -> float:
        """What a decode step reads."""
        return BYTES_PER_WEIGHT[precision] * (self.layers + self.head)

    def prefill_operations(self, length: int) -> float:
        """Operations per token of a prompt: products, and attention over half of it on average. Of the last layer only
        keys and values are needed of every token."""
        c = self.config
        scores = 4 * (c["num_hidden_layers"] - 1) * c["num_attention_heads"] * c["head_dim"]
        return 2.0 * (self.layers - self._layer[0]) + scores * length / 2


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="qwen3-0.6b",
            title="Qwen3-0.6B shape, random weights",
            folder=HERE.parent / "models" / "qwen3-0.6b",
            checkpoint=Path(tempfile.gettempdir()) / "headrace-bench-0.6b",
            loads={1: (32, 32), 8: (32, 24), 32: (32, 16)},
        ),
        Shape(
            name="bundled",
            title="The bundled model (11.4 million weights, 8,192 tokens of context)",
            folder=BUNDLED,
            checkpoint=BUNDLED,
            loads={1: (32, 256), 8: (32, 128), 32: (32, 64)},
        ),
    )
}
