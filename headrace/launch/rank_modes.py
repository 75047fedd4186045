"""How expert parallelism, also over engine cores, and decode context parallelism, which say what
ranks hold, go with other modes and features: three columns of parallel_modes.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.launch.feature_pairs import Entry, Feature, RefusedPair, ShownPair, UnshownPair
from headrace.launch.kind_modes import ATTENTION, BLOCKS, SLOTS, STORE, TRANSFERS

_EXPERT_RANKS = ShownPair(
    "e2e/test_expert_ranks.py::test_ranks_with_whole_experts_answer_as_one_worker"
)
_CORES = ShownPair(
    "e2e/test_data_parallel.py::test_cores_that_share_out_experts_answer_as_one_worker"
)
_OWN = UnshownPair("each core has rows, attention and a cache of its own")
_MODELS = "back/parallel/test_context.py::"
MOVING = "experts that follow their loads"
CORES_NAME = "experts over engine cores"
HEADS_ON_GPUS = "caches of heads on GPUs"
_SAME_EXPERTS = UnshownPair("ranks add up what they do without it")
_ON_GPUS = ShownPair("e2e/test_ranks_on_gpus.py::test_ranks_on_gpus_write_what_one_writes")
_SAME_CONTEXT = UnshownPair("it is blind to where a token's keys lie")
_OF_EXPERTS: Mapping[str, Entry] = {
    "tensor parallelism": ShownPair(
        "models/test_tensor_parallel.py::test_ranks_with_whole_experts_give_the_logits_of_one"
    ),
    "pipeline parallelism": ShownPair("e2e/test_pipeline.py::test_stages_answer_as_one_worker"),
    "decode context parallelism": _EXPERT_RANKS,
    CORES_NAME: _CORES,
    "GPUs": _ON_GPUS,
    HEADS_ON_GPUS: _ON_GPUS,
    MOVING: _EXPERT_RANKS,
    "drafts by prompt lookup": _EXPERT_RANKS,
    "drafters with weights": _EXPERT_RANKS,
    "adapters": UnshownPair("those of experts are refused by name, others are as without"),
    "quantized weights": ShownPair(
        "back/layers/moe/test_split.py::test_quantized_experts_are_those_of_one_rank"
    ),
    "models by the transformers library": RefusedPair("layers of that library are not divided"),
    ATTENTION: RefusedPair("each rank has but a part of the heads"),
    "sharded state": RefusedPair("files of ranks hold a part of each expert"),
}
_OF_CONTEXT: Mapping[str, Entry] = {
    "tensor parallelism": ShownPair(
        f"{_MODELS}test_models_over_ranks_that_share_the_context_give_the_logits_of_one"
    ),
    "pipeline parallelism": RefusedPair("stages have not been made to share out their caches"),
    "expert parallelism": _EXPERT_RANKS,
    MOVING: _EXPERT_RANKS,
    "GPUs": _ON_GPUS,
    HEADS_ON_GPUS: RefusedPair(
        "there the first start ended in a device-side assert; caches of latents are shared"
    ),
    "prefix cache, prompts in chunks, preemption": ShownPair(
        "e2e/test_shared_context.py::test_ranks_that_share_the_context_answer_as_one_worker"
    ),
    "drafts by prompt lookup": ShownPair(
        "e2e/test_shared_context.py::test_ranks_that_share_the_context_answer_as_one_worker"
    ),
    "drafters with weights": RefusedPair("a drafter's caches are whole on each rank"),
    "quantized KV cache": ShownPair(f"{_MODELS}test_quantized_caches_have_the_numbers_of_one_rank"),
    "encoders and encoder-decoders": RefusedPair("an encoder keeps no sequence"),
    "models by the transformers library": RefusedPair("layers of that library are not divided"),
    ATTENTION: RefusedPair("each rank has but a part of the tokens"),
    BLOCKS.name: RefusedPair("tokens of a block see each other"),
    **dict.fromkeys(
        (TRANSFERS, STORE, SLOTS),
        RefusedPair("files would hold a part of the tokens, and do not say which"),
    ),
}
_OVER_CORES: Mapping[str, Entry] = {
    "tensor parallelism": _CORES,
    "pipeline parallelism": RefusedPair("a rank serves other cores between its own core's steps"),
    "replicas": RefusedPair("both say how many engine cores there are"),
    "expert parallelism": _CORES,
    "GPUs": UnshownPair("it has run on CPUs alone so far; there each step is called"),
    HEADS_ON_GPUS: UnshownPair("it has run on CPUs alone so far; there each step is called"),
    MOVING: _CORES,
    "drafts by prompt lookup": _CORES,
    "drafters with weights": _CORES,
    "models by the transformers library": RefusedPair("layers of that library are not divided"),
    "sharded state": RefusedPair("files of ranks hold a part of each expert"),
    "new weights while it runs": RefusedPair(
        "cores would change theirs at different times; 400 when it comes"
    ),
}
EXPERTS = Feature(
    name="expert parallelism",
    option="--enable-expert-parallel",
    wanted=lambda start: start.options.device.enable_expert_parallel,
    beside={},
)
CORES = Feature(
    name=CORES_NAME,
    option="--data-parallel with --enable-expert-parallel",
    wanted=lambda start: start.engine.device.expert_group is not None,
    beside={},
)
FOLLOWING = Feature(
    name=MOVING,
    option="--expert-rebalance-steps, --num-redundant-experts",
    wanted=lambda start: start.engine.device.expert_balance is not None,
    beside={"tensor parallelism": _EXPERT_RANKS, "pipeline parallelism": _EXPERT_RANKS},
)
"""A row of features: what becomes of whole experts."""
SHARED = Feature(
    name="decode context parallelism",
    option="--decode-context-parallel-size",
    wanted=lambda start: start.options.device.decode_context_parallel_size > 1,
    beside={},
)


def heads_on_gpus(gpus: Feature) -> Feature:
    """The row of GPUs, for models whose caches keep keys and values of several heads."""
    return replace(
        gpus,
        name=HEADS_ON_GPUS,
        option="--device cuda with a model whose caches are of several heads",
        wanted=lambda start: gpus.wanted(start) and max(start.model.cache_heads, default=1) > 1,
    )


def beside_ranks(name: str) -> dict[str, Entry]:
    """How the row of this name goes with the three."""
    return {
        EXPERTS.name: _OF_EXPERTS.get(name, _SAME_EXPERTS),
        SHARED.name: _OF_CONTEXT.get(name, _SAME_CONTEXT),
        CORES.name: _OVER_CORES.get(name, _OWN),
    }


def with_modes(mode: Feature, replicas: str, entry: Entry) -> Feature:
    """One of the three as a row: what stands in its column, for the modes."""
    own = {EXPERTS.name: _OF_EXPERTS, SHARED.name: _OF_CONTEXT, CORES.name: _OVER_CORES}[mode.name]
    names = ("tensor parallelism", "pipeline parallelism", EXPERTS.name, SHARED.name, CORES.name)
    beside = {name: own.get(name, _OWN) for name in names if name != mode.name}
    beside["sequence parallelism"] = UnshownPair(
        "rows are divided between the layers, what these hold within them"
    )
    return replace(mode, beside={**beside, replicas: own.get(replicas, entry)})
