"""Drafters: what proposes tokens that a step verifies, by method."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from headrace.back.speculative.drafter import Drafter
from headrace.back.speculative.ngram import NgramDrafter
from headrace.back.speculative.suffix import SuffixDrafter
from headrace.base import extensions
from headrace.base.config.resolved import SpeculationSpec
from headrace.base.errors import ConfigError

DRAFTERS: dict[str, Callable[[SpeculationSpec, torch.device], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}
"""`SpeculationSpec.method` -> the drafter's maker."""


def text_drafter(spec: SpeculationSpec, device: torch.device) -> Drafter:
    """The drafter of a method without weights, or one of an installed package; ConfigError with
    its name if that fails."""
    if (ours := DRAFTERS.get(spec.method)) is not None:
        return ours(spec, device)
    make = cast(Callable[..., Drafter], extensions.load(extensions.DRAFTERS, spec.method))
    try:
        return make(spec, device)
    except Exception as error:
        raise ConfigError(
            f"extension {spec.method} failed: {type(error).__name__}: {error}",
            field="speculative_config",
        ) from error
