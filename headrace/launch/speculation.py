"""The options of speculative decoding, decided: methods we do not have and models whose steps
cannot verify drafts are refused by name."""

from __future__ import annotations

from headrace.back.models.families import FALLBACK
from headrace.base.config.resolved import DeviceSpec, SchedulerSpec, SpeculationSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.model_facts import ModelFacts

SPECULATIVE_METHODS = ("ngram",)
CPU_DRAFTING_ROWS, FAST_DRAFTING_ROWS = 8, 64
"""Decoding rows up to which a step reads all weights whatever it verifies: more tokens are nearly
free. Beyond them each draft takes time that the other rows could have."""


def speculation_spec(
    options: Options, model: ModelFacts, device_spec: DeviceSpec, scheduler: SchedulerSpec
) -> SpeculationSpec | None:
    """Speculative decoding; ConfigError for methods we do not have and models that cannot use
    it."""
    requested, flag = options.scheduler.speculative_config, "--speculative-config"
    if requested is None:
        return None
    reason = None
    if requested.method not in SPECULATIVE_METHODS:
        reason = (
            f"method {requested.method!r} is not known (known: {', '.join(SPECULATIVE_METHODS)})"
        )
    elif model.head != "lm":
        reason = f"{model.architecture} generates no text"
    elif model.family == FALLBACK:
        reason = (
            f"{model.architecture} runs by the transformers fallback, whose steps verify nothing"
        )
    elif model.has_encoder:
        reason = f"{model.architecture} has an encoder before its decoder; not supported with one"
    elif options.model.attention_capture:
        reason = "not with --attention-capture, whose steps run token by token"
    if reason is not None:
        raise ConfigError(f"{flag}: {reason}", field="speculative_config")
    longest, least = requested.prompt_lookup_max, requested.prompt_lookup_min
    if longest is None:
        longest = max(5, least or 0)
    if least is None:
        least = min(2, longest)
    if least > longest:
        raise ConfigError(
            f"{flag}: prompt_lookup_min {least} is greater than prompt_lookup_max {longest}",
            field="speculative_config",
        )
    rows = CPU_DRAFTING_ROWS if device_spec.device == "cpu" else FAST_DRAFTING_ROWS
    return SpeculationSpec(
        method=requested.method,
        num_tokens=requested.num_speculative_tokens,
        max_rows=min(rows, scheduler.max_running),
        max_match=longest,
        min_match=least,
        adaptive=requested.adaptive,
    )
