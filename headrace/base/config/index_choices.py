"""Which layers of sparse attention have an indexer of their own, by the keys of config.json. Here,
so that `launch` can ask without torch."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.config.hf import ConfigReader

LETTERS = {"F": "full", "S": "shared"}
"""Of `index_topk_pattern`."""


def shared_layers(config: ConfigReader, layers: int, *, every: int = 1) -> list[bool]:
    """Which layers read the choice of one before them: by `indexer_types`, a letter each of
    `index_topk_pattern`, or all but every `index_topk_freq`-th from `index_skip_topk_offset` - 1
    on. `every`: the family's own such number."""
    types: Sequence[str] | None = config.list("indexer_types", None, of=str, length=layers)
    pattern = config.str("index_topk_pattern", None)
    key = "index_topk_pattern" if types is None and pattern is not None else "indexer_types"
    if types is None and pattern is not None:
        types = [LETTERS.get(letter, letter) for letter in pattern]
    if types is None:
        every = config.int("index_topk_freq", every, ge=1)
        first = config.int("index_skip_topk_offset", 2, ge=1) - 1
        return [max(i - first, 0) % every != 0 for i in range(layers)]
    if len(types) != layers or not set(types) <= set(LETTERS.values()) or types[0] != "full":
        words = "letters F and S" if key == "index_topk_pattern" else "of full, shared"
        raise config.wrong(key, f"{layers} {words}, the first one full")
    return [kind == "shared" for kind in types]
