"""What the workers of one model state, as one."""

from __future__ import annotations

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.wire.step import RecordedGraphs, WorkerFacts


def check_groups(facts: list[WorkerFacts]) -> None:
    """ConfigError where the stages of a pipeline have other kinds of KV caches: they share the
    block tables."""
    kinds = [
        [(one.kind, one.span, one.block_ratio, one.blocks_per_slab) for one in fact.groups]
        for fact in facts
    ]
    if any(one != kinds[0] for one in kinds):
        shown = "; ".join(
            dict.fromkeys(
                ", ".join(f"{kind} {span or ''}".strip() for kind, span, *_ in one) for one in kinds
            )
        )
        raise ConfigError(
            f"--pipeline-parallel: the stages have other groups of KV caches ({shown}); choose "
            "--pipeline-layers so that each has layers of every kind, in equal shares",
            field="pipeline_layers",
        )


def facts_of_all(facts: list[WorkerFacts]) -> WorkerFacts:
    """What the workers state as one; the smallest pools of KV blocks and of snapshots count, as
    stages with more recurrent layers have room for fewer of these."""
    groups = tuple(
        msgspec.structs.replace(same[0], num_slots=min(one.num_slots for one in same))
        for same in zip(*(fact.groups for fact in facts), strict=True)
    )
    return msgspec.structs.replace(
        facts[0],
        groups=groups,
        num_blocks=min(fact.num_blocks for fact in facts),
        weight_bytes=sum(fact.weight_bytes for fact in facts),
        kv_bytes=sum(fact.kv_bytes for fact in facts),
        graphs=graphs_of_all([fact.graphs for fact in facts]),
    )


def graphs_of_all(graphs: list[RecordedGraphs]) -> RecordedGraphs:
    """What the workers have recorded as one: the memory of all, and more if each has more."""
    return RecordedGraphs(
        count=graphs[0].count,
        num_bytes=sum(one.num_bytes for one in graphs),
        more=all(one.more for one in graphs),
    )
