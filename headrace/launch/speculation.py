"""The options of speculative decoding, decided: methods we do not have, models whose steps cannot
verify drafts, and drafters that do not fit the model are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.back.models.families import FALLBACK
from headrace.base.config.resolved import EngineSpec, ModelSpec, SpeculationSpec, SuffixSpec
from headrace.base.config.tree import Options, SpeculationOptions
from headrace.launch.chooser import Chooser
from headrace.launch.drafters import (
    EXTRACT,
    NETWORK_METHODS,
    DraftCheckpoint,
    lacks_model,
    method_of,
    refused,
    requested_of,
)
from headrace.launch.model_facts import ModelFacts

CPU_DRAFTING_ROWS, FAST_DRAFTING_ROWS = 8, 64
"""Decoding rows up to which a step reads all weights whatever it verifies: more tokens are nearly
free. Beyond them each draft takes time that the other rows could have."""
DRAFTS = {
    "ngram": 6,
    "suffix": 15,
    "draft_model": 4,
    "eagle": 4,
    "eagle3": 4,
    "mtp": 3,
    "medusa": 3,
    "mlp_speculator": 3,
    "dflash": 15,
    "dspark": 15,
}
"""Drafts of a row, where the options leave it open."""


def speculation_spec(
    options: Options,
    model: ModelFacts,
    engine: EngineSpec,
    draft: DraftCheckpoint | None,
    choose: Chooser,
) -> SpeculationSpec | None:
    """Speculative decoding; ConfigError for methods we do not have and models that cannot use
    it."""
    requested = requested_of(options)
    if requested is None:
        return None
    if requested.method == EXTRACT:
        return None
    reason = _unverifiable(options, model, engine)
    if reason is not None:
        raise refused(reason)
    method = draft.method if draft is not None else method_of(requested.method)
    if method == "auto":
        method = "ngram"
        choose.note("--speculative-config", "auto", method, "the checkpoint carries no heads")
    if draft is None and method in NETWORK_METHODS:
        raise lacks_model(method)
    least, longest = _lookup(requested)
    on_cpu = engine.device.device == "cpu"
    rows = requested.disable_by_batch_size
    if rows is None:
        rows = CPU_DRAFTING_ROWS if on_cpu else FAST_DRAFTING_ROWS
    if method == "suffix" and not on_cpu:
        raise refused("method 'suffix' searches on the host, and runs on CPUs only; use ngram")
    return SpeculationSpec(
        method=method,
        num_tokens=requested.num_speculative_tokens or _drafts(method, draft),
        max_rows=min(rows, engine.scheduler.max_running),
        max_match=longest,
        min_match=least,
        adaptive=requested.adaptive,
        parallel=draft is not None and draft.parallel,
        rates=_rates(requested, engine, method, draft),
        sampled=_sampled(requested, method),
        masked=engine.device.pipeline_parallel == 1
        and requested.rejection_sample_method != "synthetic",
        suffix=_suffix(requested) if method == "suffix" else None,
        model=None if draft is None else _drafter(draft, model, engine),
    )


def _unverifiable(options: Options, model: ModelFacts, engine: EngineSpec) -> str | None:
    """Why steps of the model cannot verify drafts."""
    if engine.device.device not in ("cpu", "cuda"):
        return f"steps on {engine.device.device} verify nothing"
    if model.head != "lm":
        return f"{model.architecture} generates no text"
    if model.family == FALLBACK:
        return f"{model.architecture} runs by the transformers fallback, whose steps verify nothing"
    if model.has_encoder:
        return f"{model.architecture} has an encoder before its decoder; not supported with one"
    if options.model.attention_capture:
        return "not with --attention-capture, whose steps run token by token"
    return None


def _rates(
    requested: SpeculationOptions, engine: EngineSpec, method: str, draft: DraftCheckpoint | None
) -> tuple[float, ...]:
    """With which drafts stand that are not the model's to judge."""
    rates, most = requested.synthetic_acceptance_rates, requested.num_speculative_tokens
    if requested.rejection_sample_method != "synthetic":
        if rates:
            raise refused("synthetic_acceptance_rates goes with rejection_sample_method synthetic")
        return ()
    most = most or _drafts(method, draft)
    if len(rates) != most or list(rates) != sorted(rates, reverse=True):
        raise refused(
            f"synthetic_acceptance_rates: {most} rates are wanted, none greater than the one before "
            f"it; {', '.join(map(str, rates)) or 'none'} given"
        )
    if engine.device.device == "cpu" and engine.device.records:
        raise refused("rejection_sample_method synthetic needs --enforce-eager on a CPU")
    return rates


def _sampled(requested: SpeculationOptions, method: str) -> bool:
    """Whether drafts are sampled: those of networks may be."""
    if requested.draft_sample_method == "greedy":
        return False
    if method not in NETWORK_METHODS:
        raise refused(
            f"draft_sample_method probabilistic is for networks ({', '.join(NETWORK_METHODS)}); method "
            f"{method!r} has no probabilities to sample from"
        )
    return True


def _suffix(requested: SpeculationOptions) -> SuffixSpec:
    return SuffixSpec(
        max_tree_depth=requested.suffix_decoding_max_tree_depth,
        max_cached_requests=requested.suffix_decoding_max_cached_requests,
        max_spec_factor=requested.suffix_decoding_max_spec_factor,
        min_token_prob=requested.suffix_decoding_min_token_prob,
    )


def _drafts(method: str, draft: DraftCheckpoint | None) -> int:
    """As many as the method is good for, and its checkpoint."""
    config = {} if draft is None else draft.config
    most = {
        "dflash": int(config.get("block_size") or 16) - 1,
        "dspark": int(config.get("block_size") or 16) - 1,
        "medusa": config.get("num_heads"),
        "mlp_speculator": config.get("n_predict"),
    }
    drafts = DRAFTS.get(method, 4)  # of an extension
    return min(drafts, int(most.get(method) or drafts))


def _lookup(requested: SpeculationOptions) -> tuple[int, int]:
    """Tokens that are looked for, at least and at most."""
    longest, least = requested.prompt_lookup_max, requested.prompt_lookup_min
    if longest is None:
        longest = max(5, least or 0)
    if least is None:
        least = min(2, longest)
    if least > longest:
        raise refused(f"prompt_lookup_min {least} is greater than prompt_lookup_max {longest}")
    return least, longest


def _drafter(draft: DraftCheckpoint, model: ModelFacts, engine: EngineSpec) -> ModelSpec:
    """The checkpoint as it is loaded: beside the model, in its type and for its context."""
    if draft.model is None:
        _check_sizes(draft, model)
    elif draft.model.logits_width != model.logits_width:
        raise refused(
            f"the draft model {draft.path} knows {draft.model.logits_width} tokens, the model "
            f"{model.logits_width}; both must have one vocabulary"
        )
    own = draft.model
    return msgspec.structs.replace(
        engine.model,
        path=draft.path,
        name=f"{engine.model.name}-{draft.method}",
        format=draft.format,
        family=model.family if own is None else own.family,
        config=draft.config if own is None else own.config,
        quantization=None,
        manifest=None,
        adapters=None,
        control=None,
        prompt_embeds=False,
        bare=False if own is None else own.bare,
    )


def _check_sizes(draft: DraftCheckpoint, model: ModelFacts) -> None:
    """That a head is one of this model, by its config."""
    config: Mapping[str, Any] = draft.config.get("transformer_layer_config") or draft.config
    if draft.path == model.path:
        return
    for key, ours, what in (
        ("hidden_size", model.hidden_size, "hidden size"),
        ("vocab_size", model.logits_width, "vocabulary"),
    ):
        theirs = config.get(key)
        if theirs is None and key == "hidden_size":
            theirs = config.get("emb_dim")
        if theirs != ours:
            raise refused(
                f"{draft.path}: {key} is {theirs!r}, but the model's {what} is {ours}; a head "
                "drafts for the model that it was trained with alone"
            )
