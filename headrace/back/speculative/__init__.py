"""Drafters: what proposes tokens that a step verifies, by method."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.speculative.drafter import Drafter
from headrace.back.speculative.ngram import NgramDrafter
from headrace.back.speculative.suffix import SuffixDrafter
from headrace.base.config.resolved import SpeculationSpec

DRAFTERS: dict[str, Callable[[SpeculationSpec, torch.device], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}
"""`SpeculationSpec.method` -> the drafter's maker."""
