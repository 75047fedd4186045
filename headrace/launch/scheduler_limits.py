"""Bounds and shares of the scheduler: tokens of a step, partial prefills, tenants' weights. What
contradicts itself is refused with the option as typed."""

from __future__ import annotations

import math
import re

from headrace.back.models.families import FALLBACK
from headrace.base.config.tree import SchedulerOptions
from headrace.base.errors import ConfigError
from headrace.core.scheduler.choice import check_scheduler
from headrace.launch.model_facts import ModelFacts

FAST_STEP_TOKENS = 8192
# On CUDA a step of prompts may take about 48 ms: 2048 tokens of an 8 B model on an H200. Products
# reach the rate of the longest ones at 2048 rows, so more tokens would only make streams wait;
# fewer would let prompts wait behind decodes.
CUDA_STEP_OPERATIONS = 0.048 * 700e12
CUDA_LEAST_STEP_TOKENS = 512


def cuda_step_tokens(num_params: int, ranks: int) -> int:
    """A multiple of 256, the rows of the largest tiles of GEMMs."""
    tokens = CUDA_STEP_OPERATIONS * ranks / (2 * max(1, num_params))
    whole = int(tokens) // 256 * 256
    return min(FAST_STEP_TOKENS, max(CUDA_LEAST_STEP_TOKENS, whole))


def check_partial_prefills(requested: SchedulerOptions, *, encodes: bool) -> None:
    """Refuses bounds on partial prefills that contradict each other or the model, and a scheduler
    that there is not."""
    check_scheduler(requested.scheduler_cls)
    most, threshold = requested.max_partial_prefills, requested.long_prefill_threshold
    longs = requested.max_long_partial_prefills
    if encodes and (most, threshold, longs) != (None, None, None):
        raise ConfigError(
            "--max-partial-prefills, --long-prefill-threshold and --max-long-partial-prefills: this "
            "model computes a text at once"
        )
    if longs is not None and threshold is None:
        raise ConfigError(
            f"--max-long-partial-prefills {longs}: --long-prefill-threshold is needed, which says "
            "what a long prompt is"
        )
    if longs is not None and most is not None and longs > most:
        raise ConfigError(
            f"--max-long-partial-prefills {longs}: at most --max-partial-prefills ({most})"
        )


def mfu_metrics_of(requested: SchedulerOptions, model: ModelFacts) -> bool:
    """Whether steps' operations and bytes are counted; ConfigError for models whose shapes do not
    say them."""
    if not requested.mfu_metrics:
        return False
    if model.family == FALLBACK or model.encodes or model.has_encoder:
        raise ConfigError(
            f"--mfu-metrics: {model.architecture} is no decoder of headrace's own families",
            field="mfu_metrics",
        )
    return True


def tenant_weights_of(requested: SchedulerOptions) -> dict[str, float]:
    """By tenant; ConfigError for what is no SHA256=WEIGHT."""
    weights: dict[str, float] = {}
    for entry in requested.tenant_weights:
        digest, _, text = entry.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        is_digest = re.fullmatch("[0-9a-f]{64}", digest.lower()) is not None
        if not is_digest or not 0.0 < weight < math.inf:
            raise ConfigError(
                f"--tenant-weights {entry}: the SHA-256 of a key in hexadecimal, =, and a number "
                "above 0 are wanted"
            )
        weights[digest.lower()] = weight
    if weights and requested.policy != "fair":
        raise ConfigError(
            f"--tenant-weights: only --policy fair has shares, not {requested.policy}"
        )
    return weights
