"""Log-probabilities that two ways of sampling have told."""

from __future__ import annotations

import numpy as np

from headrace.back.sampling.logprobs import SampledLogprobs


def assert_same_logprobs(ours: SampledLogprobs, theirs: SampledLogprobs) -> None:
    """Row by row the same ids, columns and ranks; values but for rounding."""
    for one, other in zip(ours.rows(), theirs.rows(), strict=True):
        logprobs = one.index, one.ids.tolist(), one.rank
        assert logprobs == (other.index, other.ids.tolist(), other.rank)
        np.testing.assert_allclose(one.values, other.values, atol=2e-6)
