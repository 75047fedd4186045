"""Learned queries behind an image's rows (MOD-05): rows see each other and no query, a query sees all rows and the
queries up to itself. What a mask over both gives is what the two parts give one after the other."""

from __future__ import annotations

import torch

from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.layers.vision.query_encoder import QueryEncoder, QueryEncoderSpec
from headrace.back.parallel.mesh import Mesh

SPEC = QueryEncoderSpec(
    width=24, inner=40, heads=4, kv_heads=2, head_dim=6, layers=2, eps=1e-6, activation="silu",
    rope=RopeSpec(kind="default", head_dim=6, frequencies=(1.0, 0.1, 0.01)),
)  # fmt: skip
ROWS, QUERIES = 9, 5


def encoder() -> QueryEncoder:
    scope = Scope(
        ledger=Ledger(), mesh=Mesh(), device=torch.device("cpu"), dtype=torch.float32,
        block_tokens=16, max_positions=64, path="queries",
    )  # fmt: skip
    built = QueryEncoder(scope, SPEC)
    generator = torch.Generator().manual_seed(1)
    for param in scope.ledger.params:
        assert param.tensor is not None
        param.tensor.normal_(0, 0.5, generator=generator)
    scope.ledger.finish()
    return built


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows, queries = (torch.randn(count, 24, generator=generator) for count in (ROWS, QUERIES))
    return rows, queries


def test_each_query_gives_what_it_gives_without_those_behind_it() -> None:
    gather, (rows, queries) = encoder().gather, inputs()
    whole = gather(rows, queries)
    assert whole.shape == (QUERIES, 24) and not whole.isnan().any()
    for count in range(1, QUERIES):
        torch.testing.assert_close(gather(rows, queries[:count]), whole[:count])


def test_every_query_sees_the_last_row_and_those_before_itself() -> None:
    gather, (rows, queries) = encoder().gather, inputs()
    whole = gather(rows, queries)
    other = rows.clone()
    other[-1] += 1
    assert ((gather(other, queries) - whole).abs().amax(1) > 1e-3).all()
    changed = queries.clone()
    changed[2] += 1
    moved = (gather(rows, changed) - whole).abs().amax(1) > 1e-4
    assert moved.tolist() == [False, False, True, True, True]
