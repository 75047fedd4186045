"""The sizes of steps that are recorded: which holds a step, and which are of their own."""

from __future__ import annotations

import pytest

from headrace.back.runner.cpu_graphs import ExactSizes
from headrace.back.runner.sizes import Buckets, Sizes

LIMITS = {"max_rows": 100, "max_tokens": 1600, "groups": 2}


@pytest.mark.parametrize("queries", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 8, 40, 100])
@pytest.mark.parametrize("sizes", [Buckets(**LIMITS), ExactSizes(**LIMITS)])
def test_a_step_that_verifies_drafts_fits_a_size_of_its_own(
    sizes: Sizes, rows: int, queries: int
) -> None:
    for tokens in (rows - 1 + queries, rows * queries):
        bucket = sizes.verifying(tokens=tokens, rows=rows, queries=queries)
        assert bucket.verifies and not bucket.decode
        assert bucket.tokens >= tokens and bucket.rows >= rows and bucket.queries >= queries
        again = sizes.verifying(tokens=bucket.tokens, rows=bucket.rows, queries=bucket.queries)
        assert again == bucket
        assert bucket != sizes.of(tokens=tokens, rows=rows)


def test_rows_and_queries_are_padded_little_where_the_kernels_of_decodes_are_launched_by_them() -> (
    None
):
    sizes = Buckets(**LIMITS)
    one = sizes.verifying(tokens=4, rows=1, queries=4)
    assert (one.tokens, one.rows, one.queries) == (4, 1, 4)
    most = sizes.verifying(tokens=96, rows=24, queries=7)
    assert (most.tokens, most.rows, most.queries) == (96, 32, 8)
    assert sizes.verifying(tokens=301, rows=100, queries=4).rows == 100
    small = Buckets(max_rows=4, max_tokens=8, groups=1)
    assert small.verifying(tokens=7, rows=2, queries=4).tokens == 8
