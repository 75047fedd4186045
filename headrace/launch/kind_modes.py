"""What models that write blocks of text, and hidden states in files, do not go with: two columns of
parallel_modes.py that are asked about beside a few features which the ways of sharing a model do
not care for."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.launch.feature_pairs import Entry, Feature, RefusedPair, ShownPair

TRANSFERS, STORE, SLOTS = "KV between servers", "KV that is kept", "conversations in files"
ATTENTION, CHOSEN = "attention weights of a request", "experts that were chosen"
PART_OF_LAYERS = RefusedPair("each stage has but a part of the layers")
_STEERED = ShownPair("back/runner/test_row_directions.py::test_two_ranks_steer_and_tell_as_one")
_ONE_BY_ONE = RefusedPair("drafts stand one by one, a block together")
_UNTRIED = RefusedPair("it has not been made to go with blocks of text")
_NO_STATES = RefusedPair("the KV of its files comes without hidden states")
_OF_BLOCKS: Mapping[str, Entry] = dict.fromkeys(
    ("adapters", ATTENTION, CHOSEN, TRANSFERS, SLOTS), _UNTRIED
)
_OF_STATES: Mapping[str, Entry] = dict.fromkeys((TRANSFERS, STORE, SLOTS), _NO_STATES)

BLOCKS = Feature(
    name="diffusion language models",
    option="SDAR, LLaDA, Fast-dLLM v2, Dream",
    wanted=lambda start: start.engine.denoising is not None,
    beside={
        "tensor parallelism": ShownPair(
            "back/runner/test_denoising.py::test_ranks_that_share_a_model_write_what_one_writes"
        ),
        "pipeline parallelism": RefusedPair(
            "a block takes several passes through all of the layers"
        ),
    },
)
STATES = Feature(
    name="hidden states in files",
    option="--hidden-states-path",
    wanted=lambda start: start.engine.model.hidden_states is not None,
    beside={
        "tensor parallelism": _STEERED,
        "pipeline parallelism": PART_OF_LAYERS,
        "sequence parallelism": RefusedPair("each rank has but a part of the tokens"),
        BLOCKS.name: _UNTRIED,
    },
)
DIRECTIONS = Feature(
    name="vectors that requests add to hidden states",
    option="--control-vector-modules",
    wanted=lambda start: bool(start.options.model.control_vector_modules),
    beside={**STATES.beside, BLOCKS.name: _UNTRIED},
)
ASKED_HERE: tuple[Feature, ...] = (
    Feature(
        name="drafts",
        option="--speculative-config",
        wanted=lambda start: start.options.scheduler.speculative_config is not None,
        beside={BLOCKS.name: _ONE_BY_ONE},
    ),
    Feature(
        name="vectors in place of prompts",
        option="--enable-prompt-embeds",
        wanted=lambda start: start.options.model.enable_prompt_embeds,
        beside={BLOCKS.name: _UNTRIED},
    ),
    Feature(
        name="vectors that are added to hidden states",
        option="--control-vectors",
        wanted=lambda start: bool(start.options.model.control_vectors),
        beside={BLOCKS.name: _UNTRIED},
    ),
    Feature(
        name="results that do not depend on the batch",
        option="--deterministic",
        wanted=lambda start: start.options.model.deterministic,
        beside={BLOCKS.name: _UNTRIED},
    ),
)
"""Rows that the ways of sharing a model say nothing of."""


def beside_kinds(name: str) -> dict[str, Entry]:
    """How the row of this name goes with the two; nothing where it goes as without them."""
    columns = {BLOCKS.name: _OF_BLOCKS, STATES.name: _OF_STATES}
    return {column: entries[name] for column, entries in columns.items() if name in entries}
