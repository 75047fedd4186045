"""The driver of runner tests gives blocks as a core does: no memory twice, and none of what has no blocks."""

from __future__ import annotations

from headrace.base.wire.step import KVGroup, WorkerFacts
from tests.back.driver import Driver

GROUPS = (
    KVGroup(kind="full", caches=(0,)),
    KVGroup(kind="latent", caches=(1,), blocks_per_slab=4),
    KVGroup(kind="latent", caches=(2,), block_ratio=2, blocks_per_slab=3),
    KVGroup(kind="state", caches=(3,)),
)
FACTS = WorkerFacts(
    num_blocks=40, block_tokens=8, groups=GROUPS, logits_width=9, max_rows=4, max_model_len=64
)


def test_blocks_of_unequal_bytes_share_no_memory() -> None:
    """A slab holds blocks of one group at a time, four of the second in place of one of the first."""
    driver = Driver(FACTS)
    first = driver.add([1] * 30)
    driver.plan([(first, 30)])
    first.unknown = 0
    driver.release(first)
    rows = [driver.add([1] * length, request=length) for length in (20, 40)]
    plan = driver.plan([(rows[0], 20), (rows[1], 9)])
    assert plan.block_group.tolist() == [0] * 3 + [1] * 3 + [2] * 2 + [0] * 2 + [1] * 2 + [2]
    slabs = [
        block // GROUPS[group].blocks_per_slab
        for group, block in zip(plan.block_group.tolist(), plan.block_id.tolist(), strict=True)
    ]
    assert len(set(slabs)) == len(slabs) and 0 < min(slabs) <= max(slabs) < FACTS.num_blocks
