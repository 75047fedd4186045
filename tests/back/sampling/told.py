"""Log-probabilities that two ways of sampling have told."""

from __future__ import annotations

import numpy as np

from headrace.back.sampling.logprobs import Told


def assert_told_alike(ours: Told, theirs: Told) -> None:
    """Row by row the same ids, columns and ranks; values but for rounding."""
    for one, other in zip(ours.rows(), theirs.rows(), strict=True):
        told = one.index, one.ids.tolist(), one.rank
        assert told == (other.index, other.ids.tolist(), other.rank)
        np.testing.assert_allclose(one.values, other.values, atol=2e-6)
