"""GLM with sparse attention (GLM-5): DeepSeek V3.2 with other rotations, whose layers may share
what one indexer chooses."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.deepseek_v32 import indexed_decoder
from headrace.base.config.hf import ConfigReader

LETTERS = {"F": "full", "S": "shared"}
"""Of `index_topk_pattern`."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GlmMoeDsaForCausalLM."""
    shared = shared_layers(config, read_sizes(config).layers)
    return indexed_decoder(scope, config, shared=shared, layout="pairs")


def shared_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers read the choice of one before them: by `indexer_types`, a letter each of
    `index_topk_pattern`, or all but every `index_topk_freq`-th from `index_skip_topk_offset` - 1
    on."""
    types = config.list("indexer_types", None, of=str, length=layers)
    pattern = config.str("index_topk_pattern", None)
    key = "index_topk_pattern" if types is None and pattern is not None else "indexer_types"
    if types is None and pattern is not None:
        types = [LETTERS.get(letter, letter) for letter in pattern]
    if types is None:
        every = config.int("index_topk_freq", 1, ge=1)
        first = config.int("index_skip_topk_offset", 2, ge=1) - 1
        return [max(i - first, 0) % every != 0 for i in range(layers)]
    if len(types) != layers or not set(types) <= set(LETTERS.values()) or types[0] != "full":
        words = "letters F and S" if key == "index_topk_pattern" else "of full, shared"
        raise config.wrong(key, f"{layers} {words}, the first one full")
    return [kind == "shared" for kind in types]
