"""Which ways of running a model on several devices, and which kinds of models, go with which other
features: one table, by which a start is refused with the reason, and which docs/FEATURES.md is made
of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from headrace.back.models.families import FALLBACK
from headrace.base.config.resolved import EngineSpec, TextSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.drafters import NETWORK_METHODS
from headrace.launch.feature_pairs import (
    Entry,
    Feature,
    RefusedPair,
    ShownPair,
    Start,
    UnshownPair,
)
from headrace.launch.kind_modes import (
    ASKED_HERE,
    ATTENTION,
    BLOCKS,
    CHOSEN,
    DIRECTIONS,
    PART_OF_LAYERS,
    SLOTS,
    STATES,
    STORE,
    TRANSFERS,
    beside_kinds,
)
from headrace.launch.model_facts import ModelFacts
from headrace.launch.rank_modes import (
    CORES,
    EXPERTS,
    FOLLOWING,
    SHARED,
    beside_ranks,
    heads_on_gpus,
    with_modes,
)

_ON_GPUS = ShownPair(
    "e2e/test_pipeline_on_gpus.py::test_stages_and_parts_give_the_tokens_of_one_device"
)
TENSOR, PIPELINE, REPLICAS = "tensor parallelism", "pipeline parallelism", "replicas"
EXPERT, CONTEXT, SEQUENCE = EXPERTS.name, SHARED.name, "sequence parallelism"
_REPLICAS = ShownPair(
    "launch/test_topology.py::test_replicas_share_the_devices_and_one_core_sees_them_all",
    "each copy of the model is as one alone",
)
_STAGES = ShownPair("e2e/test_pipeline.py::test_stages_answer_as_one_worker")
_PARTS = ShownPair("e2e/test_pipeline.py::test_parts_of_long_prompts_give_the_same_tokens")
_BETWEEN = UnshownPair("rows are divided between the layers, what these hold within them")
_PLAIN_SUMS = RefusedPair("its layers do not read and write one residual of a decoder's tokens")
_GRAMMARS = ShownPair("e2e/test_pipeline.py::test_grammars_are_followed_over_several_processes")
_DRAFTS = ShownPair("e2e/test_pipeline.py::test_ranks_draft_without_a_difference")
_IN_FILES: Mapping[str, Entry] = {
    TENSOR: ShownPair("e2e/test_kv_transfers.py::test_ranks_and_stages_have_files_of_their_own"),
    PIPELINE: ShownPair(
        "e2e/test_kv_transfers.py::test_ranks_and_stages_have_files_of_their_own",
        "a server with as many stages and ranks reads them",
    ),
}
_SLOTS = ShownPair("e2e/test_slots.py::test_quantized_caches_and_ranks_have_files_too")
_ONE_KIND = RefusedPair("stages hand on the residual of a decoder's tokens alone")

MODES = (
    Feature(
        name=TENSOR,
        option="--tensor-parallel",
        wanted=lambda start: start.options.device.tensor_parallel > 1,
        beside={
            PIPELINE: _STAGES,
            REPLICAS: _REPLICAS,
            SEQUENCE: _PARTS,
            **beside_ranks(TENSOR),
        },
    ),
    Feature(
        name=PIPELINE,
        option="--pipeline-parallel",
        wanted=lambda start: start.options.device.pipeline_parallel > 1,
        beside={
            TENSOR: _STAGES,
            REPLICAS: _REPLICAS,
            SEQUENCE: _PARTS,
            **beside_ranks(PIPELINE),
        },
    ),
    Feature(
        name=SEQUENCE,
        option="--sequence-parallel",
        wanted=lambda start: start.options.device.sequence_parallel,
        beside={
            TENSOR: _PARTS,
            PIPELINE: _PARTS,
            REPLICAS: _REPLICAS,
            **dict.fromkeys((EXPERT, CONTEXT, CORES.name), _BETWEEN),
        },
    ),
    Feature(
        name=REPLICAS,
        option="--replicas",
        wanted=lambda start: start.options.device.replicas > 1,
        beside={
            **dict.fromkeys((TENSOR, PIPELINE, EXPERT, CONTEXT, SEQUENCE), _REPLICAS),
            CORES.name: beside_ranks(REPLICAS)[CORES.name],
        },
    ),
    with_modes(EXPERTS, REPLICAS, _REPLICAS),
    with_modes(SHARED, REPLICAS, _REPLICAS),
    with_modes(CORES, REPLICAS, _REPLICAS),
)
"""Ways of running a model on several devices: the columns, and the first rows."""
KINDS = (BLOCKS, STATES)
"""Columns of what is refused alone."""


def _method(start: Start) -> str:
    speculation = start.engine.speculation
    return "" if speculation is None else speculation.method


_GPUS = Feature(
    name="GPUs",
    option="--device cuda",
    wanted=lambda start: start.engine.device.device == "cuda",
    beside={
        TENSOR: ShownPair("back/test_cuda.py::test_several_devices_give_the_tokens_of_one"),
        PIPELINE: _ON_GPUS,
        SEQUENCE: _ON_GPUS,
    },
)
FEATURES: tuple[Feature, ...] = (
    _GPUS,
    heads_on_gpus(_GPUS),
    Feature(
        name="prefix cache, prompts in chunks, preemption",
        option="--prefix-caching",
        beside={
            TENSOR: ShownPair(
                "back/test_deterministic.py::test_sums_over_four_ranks_do_not_depend_on_the_batch"
            ),
            PIPELINE: ShownPair(
                "back/runner/test_stages.py::"
                "test_drafts_and_preemptions_leave_the_tokens_as_they_are"
            ),
        },
    ),
    Feature(
        name="structured output",
        option="response_format of a request",
        beside={
            TENSOR: _GRAMMARS,
            PIPELINE: replace(_GRAMMARS, note="rows with a grammar draft nothing"),
        },
    ),
    Feature(
        name="drafts by prompt lookup",
        option="--speculative-config ngram",
        wanted=lambda start: _method(start) == "ngram",
        beside={
            TENSOR: _DRAFTS,
            PIPELINE: _STAGES,
        },
    ),
    Feature(
        name="drafts from earlier texts",
        option="--speculative-config suffix",
        wanted=lambda start: _method(start) == "suffix",
        beside={
            TENSOR: _DRAFTS,
            PIPELINE: RefusedPair(
                "stages learn the texts of other rows at different times, and would draft differently"
            ),
        },
    ),
    Feature(
        name="drafters with weights",
        option="--speculative-config with a model",
        wanted=lambda start: _method(start) in NETWORK_METHODS,
        beside={
            TENSOR: ShownPair("e2e/test_drafters.py::test_ranks_that_share_a_model_draft_the_same"),
            PIPELINE: RefusedPair(
                "a drafter reads hidden states and shares embeddings and head, which lie on "
                "different stages; ngram needs none of them"
            ),
            SEQUENCE: RefusedPair(
                "a drafter reads the residual between layers, of which ranks have parts"
            ),
        },
    ),
    Feature(
        name="adapters",
        option="--enable-lora",
        wanted=lambda start: start.engine.model.adapters is not None,
        beside={
            TENSOR: ShownPair(
                "back/lora/test_engine.py::test_two_ranks_give_the_tokens_of_merged_weights"
            ),
            PIPELINE: ShownPair(
                "back/lora/test_engine.py::test_two_stages_give_the_tokens_of_merged_weights"
            ),
        },
    ),
    Feature(
        name="adapters with magnitudes (DoRA)",
        option="--lora-kinds magnitudes",
        wanted=lambda start: (
            start.engine.model.adapters is not None
            and "magnitudes" in start.engine.model.adapters.kinds
        ),
        beside={
            TENSOR: ShownPair(
                "back/lora/test_tensor_parallel.py::test_two_ranks_give_the_logits_of_one"
            ),
            PIPELINE: RefusedPair("lengths of rows are summed over all ranks, whose layers differ"),
        },
    ),
    Feature(
        name="quantized weights",
        option="--quantization",
        beside={
            TENSOR: ShownPair("models/test_quantized_ranks.py::test_every_scheme_over_two_ranks"),
            PIPELINE: _STAGES,
        },
    ),
    FOLLOWING,
    Feature(
        name="quantized KV cache",
        option="--kv-dtype",
        beside={
            TENSOR: ShownPair("e2e/test_slots.py::test_quantized_caches_and_ranks_have_files_too"),
            PIPELINE: _STAGES,
        },
    ),
    Feature(
        name="caches that stay as they are",
        option="--kv-dtype-skip-layers",
        wanted=lambda start: bool(start.engine.model.kv_plain_layers),
        beside={
            TENSOR: UnshownPair("caches are numbered alike on every rank"),
            PIPELINE: RefusedPair("stages number their caches by themselves"),
        },
    ),
    Feature(
        name="images, video and sound",
        option="a model that sees or hears (--language-model-only leaves that out)",
        wanted=lambda start: start.text.media is not None,
        beside={
            TENSOR: ShownPair(
                "models/test_media_parallel.py::test_two_ranks_give_the_logits_of_one"
            ),
            PIPELINE: _ONE_KIND,
            SEQUENCE: _PLAIN_SUMS,
        },
    ),
    Feature(
        name="encoders and encoder-decoders",
        option="a model with an encoder",
        wanted=lambda start: start.model.encodes or start.model.has_encoder,
        beside={
            TENSOR: ShownPair(
                "models/test_encoder_decoders.py::test_two_ranks_give_the_logits_of_one"
            ),
            PIPELINE: _ONE_KIND,
            SEQUENCE: _PLAIN_SUMS,
        },
    ),
    Feature(
        name="embeddings, scores and classes",
        option="a model without a language-model head",
        wanted=lambda start: start.engine.model.head != "lm",
        beside={
            TENSOR: ShownPair(
                "models/test_encoder_decoders.py::test_two_ranks_give_the_logits_of_one"
            ),
            PIPELINE: _ONE_KIND,
            SEQUENCE: _PLAIN_SUMS,
        },
    ),
    Feature(
        name="models by the transformers library",
        option=f"--family {FALLBACK}",
        wanted=lambda start: start.engine.model.family == FALLBACK,
        beside={
            TENSOR: RefusedPair("layers of that library are not divided"),
            PIPELINE: RefusedPair("layers of that library are not split into stages"),
            SEQUENCE: RefusedPair("layers of that library are not divided"),
        },
    ),
    Feature(
        name="weights in host memory",
        option="--offload-layers, --offload-experts",
        wanted=lambda start: start.engine.model.offload is not None,
        beside={
            TENSOR: UnshownPair("it takes GPUs"),
            PIPELINE: RefusedPair("layers are streamed by their numbers in the whole model"),
            SEQUENCE: RefusedPair("the layers around those with parts are of another kind"),
        },
    ),
    BLOCKS,
    Feature(
        name=ATTENTION,
        option="--attention-capture",
        wanted=lambda start: start.engine.model.attention_capture,
        beside={
            TENSOR: RefusedPair("each rank has but a part of the heads"),
            PIPELINE: PART_OF_LAYERS,
        },
    ),
    Feature(
        name=CHOSEN,
        option="--enable-return-routed-experts",
        wanted=lambda start: start.engine.model.routed_experts,
        beside={
            TENSOR: UnshownPair("every rank chooses alike"),
            PIPELINE: PART_OF_LAYERS,
        },
    ),
    STATES,
    DIRECTIONS,
    Feature(
        name=TRANSFERS,
        option="--kv-transfer-path",
        wanted=lambda start: start.engine.kv.transfer is not None,
        beside=_IN_FILES,
    ),
    Feature(
        name=STORE,
        option="--kv-store-path",
        wanted=lambda start: start.engine.kv.store is not None,
        beside={**_IN_FILES, PIPELINE: UnshownPair("its files are those of transfers")},
    ),
    Feature(
        name=SLOTS,
        option="--slot-save-path",
        wanted=lambda start: start.engine.kv.slot_save_path is not None,
        beside=dict.fromkeys((TENSOR, PIPELINE), _SLOTS),
    ),
    Feature(
        name="sharded state",
        option="--load-format sharded_state",
        wanted=lambda start: start.engine.model.format == "sharded_state",
        beside={
            TENSOR: ShownPair(
                "back/models/load/test_sharded.py::test_each_of_two_ranks_has_its_part"
            ),
            PIPELINE: RefusedPair("files of ranks hold a share of every layer"),
        },
    ),
    Feature(
        name="new weights while it runs",
        option="/update_weights and the like",
        beside={
            TENSOR: ShownPair(
                "back/transfer/test_in_place.py::test_the_ranks_of_a_split_model_take_their_shares"
            ),
            PIPELINE: RefusedPair("an order names tensors of the whole model; 409 when it comes"),
        },
    ),
)
FEATURES = tuple(
    replace(one, beside={**one.beside, **beside_ranks(one.name), **beside_kinds(one.name)})
    for one in FEATURES
)


def check_modes(
    engine: EngineSpec, options: Options, model: ModelFacts, text: TextSpec
) -> EngineSpec:
    """The engine; ConfigError for the first pair that is asked for and refused."""
    start = Start(options, model, engine, text)
    modes = [mode.name for mode in (*MODES, *KINDS) if mode.wanted(start)]
    for one, other, entry in pairs():
        if isinstance(entry, RefusedPair) and other.name in modes and one.wanted(start):
            asked, beside = (other, one) if other.field else (one, other)
            raise ConfigError(
                f"{asked.option} does not go with {beside.option}: {entry.why}", field=asked.field
            )
    return engine


def pairs() -> Iterator[tuple[Feature, Feature, Entry]]:
    """Every row with every column that it has an entry for."""
    columns = {mode.name: mode for mode in (*MODES, *KINDS)}
    for row in (*MODES, *FEATURES, *ASKED_HERE):
        for name, entry in row.beside.items():
            yield row, columns[name], entry
