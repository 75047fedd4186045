"""What the indexers of groups of positions share: the caches of what is pooled, and the positions
of chosen groups.

T tokens, G lists of positions for each, K groups in one, S positions in one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, GroupForm, LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.group_select.op import OP as GROUP_SELECT
from headrace.back.kernels.group_select.op import GroupSelect, GroupSelectProblem
from headrace.back.kernels.group_write.op import OP as GROUP_WRITE
from headrace.back.kernels.group_write.op import GroupWriteProblem
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """How the entries of groups come from their tokens: see op group_write, whose words these are.
    `rope`: of entries at their group's first position."""

    width: int
    group: int
    series: int = 1
    gated: bool = False
    eps: float | None = None
    rope: RopeSpec | None = None
    offset: int = 0


class GroupPool:
    """The caches of one kind of entries: what is kept of tokens until their group is whole, and the
    entries. `cache`: the id of the first of the two."""

    def __init__(self, scope: Scope, cache: int, spec: PoolSpec) -> None:
        check_group(scope, spec.group)
        self._scope, self._cache, self._spec = scope, cache, spec
        rope = spec.rope
        self._problem = GroupWriteProblem(
            device=scope.kind,
            dtype=scope.dtype,
            width=spec.width,
            group=spec.group,
            block_tokens=scope.block_tokens,
            series=spec.series,
            gated=spec.gated,
            eps=spec.eps,
            rotary=rope.rotary_dim if rope is not None else 0,
            offset=spec.offset,
            layout=rope.layout if rope is not None else "half",
        )
        self._rope = None if rope is None else Rope(scope, rope)
        self._write = not_loaded

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of the tokens, those of a group are kept, or of two where entries reach back."""
        spec = self._spec
        tokens = LatentForm(
            cache=self._cache,
            width=self._problem.token_width,
            kind="window",
            span=spec.group * spec.series,
        )
        return tokens, GroupForm(cache=self._cache + 1, width=spec.width, group=spec.group)

    @property
    def entries(self) -> int:
        """The id of the entries' cache."""
        return self._cache + 1

    def write(self, token_TZ: torch.Tensor, batch: Batch) -> None:
        """Keeps what is given of the step's tokens, and makes the entries of groups that are
        whole."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        entry_plan = batch.plans[batch.group_of_layer[self._cache + 1]]
        write_rows(batch.kv[self._cache], token_TZ, plan.slot_T)
        table_PR = batch.positions_T[:0] if self._rope is None else self._rope.table_PR
        tokens, entries = batch.kv[self._cache], batch.kv[self._cache + 1]
        self._write(tokens, entries, table_PR, plan, entry_plan)

    def finish(self, bias_GX: torch.Tensor | None, weight_I: torch.Tensor | None) -> None:
        """Binds the op with its weights."""
        self._write = self._scope.bind(GROUP_WRITE, self._problem, bias_GX, weight_I)


def check_group(scope: Scope, group: int) -> None:
    """A group must divide a block, or be whole blocks."""
    block = scope.block_tokens
    if group % block and block % group:
        raise ConfigError(
            f"--block-tokens {block}: this model's groups of {group} positions must divide a block "
            "or be whole blocks",
            field="block_tokens",
        )


def write_rows(cache: torch.Tensor, row_TZ: torch.Tensor, slot_T: torch.Tensor) -> None:
    """Rows into a cache [num_blocks, block_tokens, Z] at their slots."""
    block_T = torch.div(slot_T, cache.shape[1], rounding_mode="floor")
    cache[block_T, slot_T - block_T * cache.shape[1]] = row_TZ


def bind_select(
    scope: Scope, *, heads: int, dim: int, group: int, top_k: int, local: int | None = None
) -> GroupSelect:
    """Op group_select; with `local` groups are scored by their best key."""
    problem = GroupSelectProblem(
        device=scope.kind,
        dtype=scope.dtype,
        heads=heads,
        dim=dim,
        group=group,
        top_k=top_k,
        block_tokens=scope.block_tokens,
        best_key=local is not None,
        local=local or 0,
    )
    select: GroupSelect = scope.bind(GROUP_SELECT, problem)
    return select


def positions_of(
    groups_TGK: torch.Tensor, positions_T: torch.Tensor, *, group: int, tail: bool
) -> torch.Tensor:
    """chosen_TGS, int32: the positions of the chosen groups up to the query's own, and with `tail`
    those behind the last whole group; in rising order, -1 behind the last of them."""
    offset_G = torch.arange(group, device=groups_TGK.device)
    at_TGS = (groups_TGK.long()[..., None] * group + offset_G).flatten(2)
    position_T11 = positions_T[:, None, None]
    absent_TGS = groups_TGK.repeat_interleave(group, dim=2) < 0
    if tail:
        first_T11 = (position_T11 + 1) // group * group
        tail_T1G = first_T11 + offset_G[: group - 1]
        tail_TGS = tail_T1G.expand(-1, at_TGS.shape[1], -1)
        at_TGS = torch.cat((at_TGS, tail_TGS), dim=2)
        absent_TGS = torch.cat((absent_TGS, torch.zeros_like(tail_TGS, dtype=torch.bool)), dim=2)
    behind = torch.iinfo(torch.int32).max
    at_TGS = at_TGS.masked_fill(absent_TGS | (at_TGS > position_T11), behind).sort(dim=2).values
    return at_TGS.masked_fill(at_TGS == behind, -1).int()
