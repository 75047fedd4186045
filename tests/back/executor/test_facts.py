"""What workers state, as one: no more than each of them has."""

from __future__ import annotations

from headrace.back.executor.facts import facts_of_all
from headrace.base.wire.step import KVGroup, WorkerFacts


def facts_of(num_blocks: int, num_slots: int, caches: tuple[int, ...]) -> WorkerFacts:
    return WorkerFacts(
        num_blocks=num_blocks,
        block_tokens=16,
        groups=(
            KVGroup(kind="full", caches=(0,)),
            KVGroup(kind="state", caches=caches, num_slots=num_slots),
        ),
        logits_width=100,
        max_rows=4,
        max_model_len=64,
        kv_bytes=num_blocks,
    )


def test_the_smallest_pools_of_blocks_and_of_snapshots_count() -> None:
    """PAR-12: a stage with more recurrent layers has fewer slots; what lay in the others' was written behind its
    memory."""
    found = facts_of_all([facts_of(60, 21, (1, 2)), facts_of(50, 13, (1, 2, 3))])
    assert found.num_blocks == 50 and found.kv_bytes == 110
    assert [group.num_slots for group in found.groups] == [0, 13]
    assert found.groups[1].caches == (1, 2), "all else is the first one's, which samples"
