"""Flags over the defaults of the model's generation_config.json."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.sampling_flags import sampling_of

DEFAULTS: dict[str, float | int] = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.9,
    "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.2,
}  # fmt: skip


def flags(**given: Any) -> argparse.Namespace:
    fields = {"temperature": None, "top_p": None, "top_k": None, "max_tokens": 5}
    return argparse.Namespace(**{**fields, "stop": [], "sampling_seed": None, **given})


def test_every_default_of_the_model_counts() -> None:
    params = sampling_of(flags(), DEFAULTS)
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS


def test_a_flag_goes_before_the_models_default() -> None:
    params = sampling_of(flags(temperature=0.0, top_k=3), DEFAULTS)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.0, 3, 1.2)
