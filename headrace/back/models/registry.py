"""Which code builds a model: architecture name in config.json -> family -> module.

A family is a row here and a file beside this one. What no row names goes to the `transformers`
fallback, if that library knows it; the choice is a decision, never silent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.decode_context import check_forms
from headrace.back.layers.offload import Offload
from headrace.back.layers.prompt_vectors import PromptVectors
from headrace.back.layers.scope import Head, Ledger, Scope
from headrace.back.models.blocks import BuildFamily, Decoder
from headrace.back.models.control_layer import directions, row_directions
from headrace.back.models.encoder_families import (
    BIDIRECTIONAL,
    DECODERS_ALONE,
    EMBEDDERS,
    ENCODER_DECODERS,
    JUDGES,
    TAGGERS,
)
from headrace.back.models.families import (
    ARCHITECTURES,
    FALLBACK,
    TOWERS,
    architecture_of,
    family_of,
    text_config,
)
from headrace.back.models.media_families import WITH_MEDIA
from headrace.back.models.pooling_families import POOLERS
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.published_families import DEEP_HEADS, HEAD_NAMES, RENAMED
from headrace.back.models.text_parts import TEXT_TYPES
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.cache_scales import CacheScales
from headrace.back.quant.parts import PartSchemes
from headrace.back.quant.stored import Stored
from headrace.base import extensions
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision, ModelSpec
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.registry import Registry

__all__ = ["ARCHITECTURES", "FALLBACK", "FAMILIES", "build_model", "family_of"]

NATIVE = {
    *(*ARCHITECTURES.values(), *TEXT_TYPES.values()),
    *(*BIDIRECTIONAL.values(), *WITH_MEDIA.values()),
    *ENCODER_DECODERS.values(),
    *DECODERS_ALONE.values(),
    *JUDGES.values(),
    *TAGGERS.values(),
    *(family for family, _ in EMBEDDERS.values()),
    *(family for family, _, _ in POOLERS.values()),
    *("late_vision", "two_towers", "frame_labels"),
}
FAMILIES: Registry[BuildFamily] = Registry(
    "model family",
    {name: f"headrace.back.models.{name}:build" for name in (*sorted(NATIVE), FALLBACK)},
)

_TEXT_ALONE = Decision("model.parts", "auto", "text", "images, audio and video are not read")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_model(
    spec: ModelSpec,
    *,
    mesh: Mesh,
    device: torch.device,
    block_tokens: int,
    verify_queries: int = 1,
    stored: Stored | None = None,
    planned: str = "",
    ledger: Ledger | None = None,
    hollow: bool = False,
    slots: AdapterSlots | None = None,
    offload: Offload | None = None,
    cache_scales: CacheScales | None = None,
) -> LoadableModel:
    """An empty model on `device`: its weights are to be loaded (`model.weights`), then
    `finish_load` makes it ready.

    `block_tokens` is the KV block size, which attention kernels are chosen for, as for
    `verify_queries`; `stored` the tensors that stay in the quantized blocks of their checkpoint.
    `verify_queries`, `planned`, `hollow`: see Scope. `ledger`: what the layers leave behind, if the
    caller reads it. `slots`: those of adapters that are there already. `offload`: which layers'
    weights lie in host memory. `cache_scales`: those of the checkpoint, of a quantized KV cache.
    """
    scope = scope_of(
        spec,
        mesh=mesh,
        device=device,
        block_tokens=block_tokens,
        verify_queries=verify_queries,
        stored=stored,
        planned=planned,
        ledger=ledger,
        slots=slots,
        hollow=hollow,
        offload=offload,
        cache_scales=cache_scales,
    )
    model = _build(spec, scope)
    beside = tuple(rf"{re.escape(one.name)}\..*" for one in spec.dense if not one.path)
    if beside:  # load/dense.py reads them
        model.weights = replace(model.weights, ignored=(*model.weights.ignored, *beside))
    if mesh.pp.size > 1:
        _check_stage(model, spec, mesh)
    if scope.online is not None:
        scope.online.check(scope.ledger.params)
    if mesh.dcp.axis.size > 1:
        check_forms(model.kv_forms, mesh.dcp.axis.size, spec.family)
    whole_experts = mesh.ep.size > 1 and mesh.pp.size == 1  # a stage may have none
    if whole_experts and not any(param.routed for param in scope.ledger.params):
        raise ConfigError(
            f"--enable-expert-parallel: a model of family {spec.family} has no routed experts here; leave it out",
            field=mesh.ep.option,
        )
    _check_taken(model, spec, scope)
    if spec.prompt_embeds:
        _take_vectors(model, spec, mesh)
    if spec.head == TOWERS:
        _leave_towers(model, spec)
    return model


def _leave_towers(model: LoadableModel, spec: ModelSpec) -> None:
    """The model encodes media alone; ConfigError where it has no towers before a decoder."""
    if not isinstance(model, Decoder) or model.media is None:
        raise ConfigError(
            f"--mm-encoder-only: models of family {spec.family} have no towers before a decoder",
            field="mm_encoder_only",
        )
    if any(form.packing is not None and form.packing.marks for form in model.media.forms):
        raise ConfigError(
            f"--mm-encoder-only: passes of family {spec.family} give rows of marks too, which no "
            "file holds",
            field="mm_encoder_only",
        )
    model.state = TOWERS


def _take_vectors(model: LoadableModel, spec: ModelSpec, mesh: Mesh) -> None:
    """The model takes vectors in place of tokens too; ConfigError where it cannot."""
    if not isinstance(model, Decoder) or mesh.pp.size > 1:
        where = "stages of a pipeline" if mesh.pp.size > 1 else f"models of family {spec.family}"
        raise ConfigError(
            f"--enable-prompt-embeds: {where} take no vectors", field="enable_prompt_embeds"
        )
    width = model.spec.embedding_width or model.spec.sizes.width
    model.media = PromptVectors(model.media, width=width, dtype=DTYPES[spec.dtype])


def _check_taken(model: LoadableModel, spec: ModelSpec, scope: Scope) -> None:
    """ConfigError for control vectors and adapters of which the model takes none."""
    if (scope.control or scope.directions) and not (
        isinstance(model, Decoder) and model.spec.streams is None
    ):
        raise ConfigError(
            f"--control-vectors: nothing is added in models of family {spec.family}",
            field="control_vectors",
        )
    if scope.adapters is not None and model.adapters is None:
        raise ConfigError(
            f"--enable-lora: adapters are not applied in models of family {spec.family}",
            field="enable_lora",
        )


def _check_stage(model: LoadableModel, spec: ModelSpec, mesh: Mesh) -> None:
    """ConfigError for a model that knows of no stages."""
    if not isinstance(model, Decoder) or model.media is not None:
        raise ConfigError(
            f"--pipeline-parallel {mesh.pp.size}: models of family {spec.family} are not split into "
            "stages; use --tensor-parallel",
            field="pipeline_parallel",
        )


def scope_of(
    spec: ModelSpec,
    *,
    mesh: Mesh,
    device: torch.device,
    block_tokens: int,
    verify_queries: int = 1,
    stored: Stored | None = None,
    planned: str = "",
    ledger: Ledger | None = None,
    slots: AdapterSlots | None = None,
    hollow: bool = False,
    offload: Offload | None = None,
    cache_scales: CacheScales | None = None,
) -> Scope:
    """Where all layers of a checkpoint are built; see build_model."""
    return Scope(
        ledger=ledger or Ledger(),
        mesh=mesh,
        device=device,
        dtype=DTYPES[spec.dtype],
        block_tokens=block_tokens,
        verify_queries=verify_queries,
        max_positions=spec.max_model_len,
        encoder_tokens=spec.encoder_tokens,
        head=_head(spec),
        online=online_schemes(spec),
        stored=stored or {},
        kv_quantized=spec.kv_dtype,
        kv_plain=frozenset(spec.kv_plain_layers),
        deterministic=spec.deterministic,
        adapters=slots or _slots(spec),
        planned=planned,
        hollow=hollow,
        offload=offload,
        image_norm=spec.image_norm,
        shares_encoder=spec.shares_encoder,
        cache_scales=cache_scales,
        control=directions(spec.control),
        directions=row_directions(spec.control),
        unfused=frozenset(spec.unfused),
    )


def _head(spec: ModelSpec) -> Head:
    names = spec.config.get("architectures")
    named = names[0] if isinstance(names, list) and names else ""
    return Head(
        kind=spec.head,
        num_labels=spec.num_labels,
        bare=spec.bare,
        name=HEAD_NAMES.get(named, "score"),
        deep=named in DEEP_HEADS,
    )


def online_schemes(spec: ModelSpec) -> PartSchemes | None:
    """What is made of plain weights; None: nothing."""
    parts = spec.quantization_parts
    if spec.quantization is None and parts is None:
        return None
    return (
        PartSchemes(spec.quantization) if parts is None else PartSchemes(spec.quantization, parts)
    )


def _slots(spec: ModelSpec) -> AdapterSlots | None:
    if spec.adapters is None:
        return None
    asked = spec.adapters
    return AdapterSlots(count=asked.slots, max_rank=asked.max_rank, kinds=frozenset(asked.kinds))


def _build(spec: ModelSpec, scope: Scope) -> LoadableModel:
    reader = ConfigReader(spec.config, "config.json")
    if spec.family in extensions.allowed(extensions.MODELS):
        return _build_foreign(spec.family, scope, reader)
    family = FAMILIES.load(spec.family)
    if spec.family == FALLBACK:
        return family(scope, reader)
    named = architecture_of(spec.config)
    if not named.within and not named.base_within:
        return _as_named(family(scope, reader), spec.config)
    scope.ledger.note(_TEXT_ALONE)
    reader = ConfigReader(text_config(spec.config), "config.json: text_config")
    return family(replace(scope / named.within, base_within=named.base_within), reader)


def _as_named(model: LoadableModel, config: Mapping[str, Any]) -> LoadableModel:
    """The model, which finds its tensors under the names of its architecture."""
    names = config.get("architectures")
    others = RENAMED.get(names[0]) if isinstance(names, list) and names else None
    if others is not None:
        plan = model.weights
        model.weights = replace(plan, renamed=(*plan.renamed, *others))
    return model


def _build_foreign(name: str, scope: Scope, reader: ConfigReader) -> LoadableModel:
    """A model of an extension; what it raises is said to be its own."""
    build = cast(BuildFamily, extensions.load(extensions.MODELS, name))
    try:
        return build(scope, reader)
    except HeadraceError:
        raise
    except Exception as error:
        raise ConfigError(
            f"extension {name} cannot build the model: {type(error).__name__}: {error}",
            field="extensions",
        ) from error
