"""What ops of experts with quantized weights share: the problem around the mixture, and the samples
of self-checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from headrace.back.kernels.experts.op import ExpertsProblem, arguments_of, biases_of, of_three
from headrace.back.kernels.op import Sample, sample_generator

P = TypeVar("P", bound="QuantizedExpertsProblem")
RandomExperts = Callable[[Any, torch.Generator], Any]
UNIT = 128
"""Sizes of samples keep their remainder by it: by tiles, blocks and groups."""


@dataclass(frozen=True, kw_only=True)
class QuantizedExpertsProblem:
    """The mixture."""

    mixture: ExpertsProblem

    @property
    def device(self) -> str:
        """The mixture's."""
        return self.mixture.device

    @property
    def dtype(self) -> torch.dtype:
        """Of x, biases and y."""
        return self.mixture.dtype


def sample_of(
    problem: QuantizedExpertsProblem, experts_of: RandomExperts, rows: tuple[int, ...]
) -> Sample:
    """The problem's own sizes with three experts, one of which nobody chose, for each of these
    numbers of tokens."""
    mixture = of_three(problem.mixture)
    small = replace(problem, mixture=mixture)
    generator = sample_generator(mixture.device)
    weights = experts_of(small, generator), *biases_of(mixture, generator)
    first, *more = (arguments_of(mixture, count, generator) for count in rows)
    return Sample(problem=small, weights=weights, arguments=first, further=tuple(more))


def narrow(problem: P) -> P:
    """The problem with less width."""
    whole = problem.mixture
    mixture = replace(whole, width=_small(whole.width), inner=_small(whole.inner))
    return replace(problem, mixture=mixture)


def _small(size: int) -> int:
    return size if size < 2 * UNIT else UNIT + size % UNIT
