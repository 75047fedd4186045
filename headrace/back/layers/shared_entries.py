"""Entries of compressed caches that several layers read (DeepSeek V4.1, "CSA2"): a layer makes
them, with keys of an indexer of the same latents; some layers choose among them by queries of their
own, the others read what was chosen last. Behind one layer all choose within its best blocks of
neighbouring entries.

Choices and blocks lie in places that the layers share: a step that is recorded reads the tensors
that it wrote itself. T tokens, D width of latents, R dimensions of them that are rotated, X rank of
the queries' bottleneck, J heads of the indexer, I dimensions of one, K groups chosen, C blocks, S
entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, GroupForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.group_select.op import GroupSelect, entry_places
from headrace.back.kernels.sparse_attention.op import GATHERED, row_of_tokens
from headrace.back.layers.compressed_entries import (
    EntriesRead,
    EntryPlace,
    GroupIndexSpec,
    turned,
)
from headrace.back.layers.group_choice import GroupPool, PoolSpec, bind_select
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part
from headrace.base.errors import ConfigError


class EntryGroup:
    """What the layers share that read the same entries: the ids of the caches, and of the step that
    runs the groups chosen last, chosen_TK."""

    def __init__(self) -> None:
        self.entries = self.keys = -1
        self.chosen_TK = torch.empty(0)


class BestBlocks:
    """The blocks of entries within which later layers choose, block_TC, -1 in place of none; of the
    step that runs."""

    def __init__(self) -> None:
        self.block_TC = torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """`most`: C blocks of `entries` each. `narrows`: this layer says which, others choose within
    them. All are the same for texts of no more entries than that."""

    most: int
    entries: int
    narrows: bool
    best: BestBlocks


@dataclass(frozen=True, kw_only=True)
class SharedEntriesSpec:
    """`makes`: this layer makes the entries that `among` stands for; `index`: it chooses, None: it
    reads what was chosen last; `blocks`: see BlockSpec, None: it chooses among all."""

    group: int
    top_groups: int
    among: EntryGroup
    makes: bool = False
    index: GroupIndexSpec | None = None
    blocks: BlockSpec | None = None

    def build(self, scope: Scope, cache: int, place: EntryPlace) -> SharedEntries:
        """See EntrySpec."""
        return SharedEntries(scope, cache, self, place)


class SharedEntries:
    """See EntryBranch and SharedEntriesSpec."""

    def __init__(
        self, scope: Scope, cache: int, spec: SharedEntriesSpec, place: EntryPlace
    ) -> None:
        if scope.block_tokens % spec.group:
            raise ConfigError(
                f"--block-tokens {scope.block_tokens}: this model's groups of {spec.group} positions "
                "must divide it",
                field="block_tokens",
            )
        self._spec, self.group, self.top_groups = spec, spec.group, spec.top_groups
        self.parts: tuple[Part, ...] = ()
        self._maker = self._chooser = None
        if spec.makes:
            assert spec.index is not None, "a layer that makes entries chooses among them"
            self._maker = EntryMaker(scope, cache, spec, spec.index, place)
            self.parts += self._maker.parts
        if spec.index is not None:
            self._chooser = EntryChooser(scope / "indexer", spec, spec.index, place)
            self.parts += (Part("indexer.weights_proj", spec.index.heads, 1),)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Those of a layer that makes entries."""
        return () if self._maker is None else self._maker.kv_forms

    def queries(
        self,
        projected: Sequence[torch.Tensor],
        q_TX: torch.Tensor,
        angles_TR: torch.Tensor,
        batch: Batch,
    ) -> tuple[torch.Tensor, ...]:
        """See EntryBranch: of a layer that chooses rotated queries, their heads' weights and, where
        it is bound to them, blocks; else the groups that were chosen last."""
        if self._maker is not None:
            self._maker.write(projected[: len(self._maker.parts)], batch)
        if self._chooser is None:
            return (self._spec.among.chosen_TK,)
        return self._chooser.queries(q_TX, projected[-1], angles_TR, batch)

    def read(
        self, handed: tuple[torch.Tensor, ...], position_T: torch.Tensor, batch: Batch
    ) -> EntriesRead:
        """See EntryBranch. Layers behind this one read the choice for the same tokens."""
        among = self._spec.among
        if self._chooser is None:
            among.chosen_TK = handed[0]
        else:
            among.chosen_TK = self._chooser.choose(handed, position_T, batch)
        plan = batch.plans[batch.group_of_layer[among.entries]]
        return EntriesRead(batch.kv[among.entries], plan, among.chosen_TK)


class EntryMaker:
    """Makes the entries of groups as soon as the last of their tokens is there, and the indexer's
    keys of the same latents before these are rotated. `scope` is the attention's, `cache` the id of
    the first of three caches: tokens, entries, keys."""

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: SharedEntriesSpec,
        index: GroupIndexSpec,
        place: EntryPlace,
    ) -> None:
        self._spec, self._index, self._width = spec, index, place.width
        self._block_tokens, gated = scope.block_tokens, spec.group > 1
        names = ("compressor.wkv", "compressor.wgate") if gated else ("compressor.wkv",)
        self.parts = tuple(Part(name, place.width, 1) for name in names)
        self._pool = GroupPool(
            scope,
            cache,
            PoolSpec(
                width=place.width,
                group=spec.group,
                gated=gated,
                eps=place.eps,
                rope=place.rope,
                offset=place.width - place.rope.rotary_dim,
            ),
        )
        spec.among.entries, spec.among.keys = self._pool.entries, cache + 2
        self._norm = scope.param("compressor.norm.weight", (place.width,), init="ones")
        inside = scope / "indexer"
        self._key = ColumnLinear(inside, place.width, (Part("wk", index.dim, 1),))
        self._key_norm = RMSNorm(inside / "k_norm", index.dim, eps=place.eps)
        self._rope = Rope(scope, place.rope)
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of tokens, entries and keys."""
        keys = GroupForm(cache=self._spec.among.keys, width=self._index.dim, group=self._spec.group)
        return (*self._pool.kv_forms, keys)

    def write(self, projected: Sequence[torch.Tensor], batch: Batch) -> None:
        """Keeps what is given of the step's tokens. Keys are made for every token, of the entry of
        its group; those of groups that go on fall into the null block."""
        group, among = self._spec.group, self._spec.among
        self._pool.write(torch.cat(tuple(projected), dim=1), batch)
        position_T = batch.positions_T
        first_T = (position_T - (group - 1)).clamp(min=0)
        angles_TR = self._rope.table_PR[first_T]
        whole_T = (position_T + 1) % group == 0
        entry_TD = batch.kv[among.entries][self._places(among.entries, whole_T, batch)]
        latent_T1D = turned(entry_TD[:, None], angles_TR, back=True)
        key_TI = self._key_norm.norm(self._key.project(latent_T1D[:, 0]))
        key_TI = turned(key_TI[:, None], angles_TR)[:, 0]
        batch.kv[among.keys][self._places(among.keys, whole_T, batch)] = key_TI

    def _places(
        self, cache: int, whole_T: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block and the place in it of each token's group; the null block where it goes on."""
        slot_T = batch.plans[batch.group_of_layer[cache]].slot_T.masked_fill(~whole_T, 0)
        block_T = torch.div(slot_T, self._block_tokens, rounding_mode="floor")
        place_T = (slot_T - block_T * self._block_tokens) // self._spec.group
        return block_T, place_T

    def _finish(self) -> None:
        weight_D = self._norm.take().float()
        zeros_GD = weight_D.new_zeros(self._spec.group, self._width)
        self._pool.finish(zeros_GD if self._spec.group > 1 else None, weight_D)


class EntryChooser:
    """Chooses groups for a layer's queries, by the entries' keys. `scope` is the indexer's."""

    def __init__(
        self, scope: Scope, spec: SharedEntriesSpec, index: GroupIndexSpec, place: EntryPlace
    ) -> None:
        self._scope, self._spec, self._index = scope, spec, index
        heads = Part("wq_b", index.heads * index.dim, 1)
        self._up = ColumnLinear(scope, place.q_rank, (heads,))
        self._select: GroupSelect = not_loaded
        scope.on_finish(self._finish)

    def queries(
        self, q_TX: torch.Tensor, weight_TJ: torch.Tensor, angles_TR: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, ...]:
        """See SharedEntries.queries."""
        q_TJI = turned(self._up.project(q_TX).unflatten(1, (self._index.heads, -1)), angles_TR)
        blocks = self._spec.blocks
        if blocks is None or blocks.narrows or not self._bound(batch):
            return q_TJI, weight_TJ
        return q_TJI, weight_TJ, blocks.best.block_TC

    def choose(
        self, handed: tuple[torch.Tensor, ...], position_T: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """groups_TK, int32: see op group_select."""
        q_TJI, weight_TJ, *within = handed
        blocks, plan, keys = self._spec.blocks, self._plan(batch), batch.kv[self._spec.among.keys]
        if within:
            entry_TS = _entries_of(within[0], self._spec.blocks)
            return self._best(q_TJI, weight_TJ, keys, plan, position_T, entry_TS)
        if blocks is not None and blocks.narrows and self._bound(batch):
            blocks.best.block_TC = self._blocks(q_TJI, weight_TJ, keys, plan, position_T, blocks)
        return self._select(q_TJI, weight_TJ, keys, plan)[:, 0]

    def _plan(self, batch: Batch) -> AttentionPlan:
        return batch.plans[batch.group_of_layer[self._spec.among.keys]]

    def _bound(self, batch: Batch) -> bool:
        """Whether some text of the step may have more entries than the blocks hold."""
        blocks = self._spec.blocks
        assert blocks is not None
        longest = self._plan(batch).max_kv_len // self._spec.group
        return longest > blocks.most * blocks.entries

    def _scores(
        self,
        q_CJI: torch.Tensor,
        weight_CJ: torch.Tensor,
        keys: torch.Tensor,
        table_CB: torch.Tensor,
        entry_CS: torch.Tensor,
        seen_C1: torch.Tensor,
    ) -> torch.Tensor:
        """score_CS, float32; -Inf of entries that are none or not seen."""
        column_CS, place_CS = entry_places(
            entry_CS.clamp(min=0), self.group, self._scope.block_tokens
        )
        column_CS = column_CS.clamp(max=table_CB.shape[1] - 1)
        key_CSI = keys[table_CB.gather(1, column_CS).long(), place_CS].float()
        met_CJS = torch.bmm(q_CJI.float(), key_CSI.transpose(1, 2)).relu_()
        score_CS = torch.bmm(weight_CJ.float()[:, None], met_CJS)[:, 0]
        absent_CS = (entry_CS < 0) | (entry_CS >= seen_C1)
        return score_CS.masked_fill(absent_CS, float("-inf"))

    @property
    def group(self) -> int:
        """Positions of an entry."""
        return self._spec.group

    def _blocks(
        self,
        q_TJI: torch.Tensor,
        weight_TJ: torch.Tensor,
        keys: torch.Tensor,
        plan: AttentionPlan,
        position_T: torch.Tensor,
        spec: BlockSpec,
    ) -> torch.Tensor:
        """block_TC of each token: those with the best entry, that of its last entry among them."""
        count = -(-(plan.max_kv_len // self.group) // spec.entries)
        entry_S = torch.arange(count * spec.entries, device=q_TJI.device)
        most = max(1, GATHERED // (len(entry_S) * self._index.dim))
        chosen, row_T = [], row_of_tokens(plan, len(q_TJI))
        for first in range(0, len(q_TJI), most):
            part = slice(first, first + most)
            seen_C1 = (position_T[part, None] + 1) // self.group
            table_CB, entry_CS = plan.block_table_RB[row_T[part]], entry_S.expand(len(seen_C1), -1)
            of_queries = (q_TJI[part], weight_TJ[part], keys, table_CB)
            score_CS = self._scores(*of_queries, entry_CS, seen_C1)
            best_CB = score_CS.unflatten(1, (count, spec.entries)).amax(2)
            last_C1 = (seen_C1 - 1) // spec.entries
            own_CB = torch.arange(count, device=q_TJI.device) == last_C1
            chosen.append(_best_of(best_CB.masked_fill(own_CB, float("inf")), spec.most))
        return torch.cat(chosen)

    def _best(
        self,
        q_TJI: torch.Tensor,
        weight_TJ: torch.Tensor,
        keys: torch.Tensor,
        plan: AttentionPlan,
        position_T: torch.Tensor,
        entry_TS: torch.Tensor,
    ) -> torch.Tensor:
        """groups_TK of the best among these entries."""
        most = max(1, GATHERED // (entry_TS.shape[1] * self._index.dim))
        chosen, row_T = [], row_of_tokens(plan, len(q_TJI))
        for first in range(0, len(q_TJI), most):
            part = slice(first, first + most)
            seen_C1 = (position_T[part, None] + 1) // self.group
            of_queries = (q_TJI[part], weight_TJ[part], keys, plan.block_table_RB[row_T[part]])
            score_CS = self._scores(*of_queries, entry_TS[part], seen_C1)
            place_CK = _best_of(score_CS, self._spec.top_groups)
            best_CK = entry_TS[part].gather(1, place_CK.clamp(min=0))
            chosen.append(best_CK.masked_fill(place_CK < 0, -1).int())
        return torch.cat(chosen)

    def _finish(self) -> None:
        index = self._index
        self._select = bind_select(
            self._scope,
            heads=index.heads,
            dim=index.dim,
            group=self._spec.group,
            top_k=index.top_groups,
        )


def _best_of(score_CS: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the best scores, in rising order, -1 behind them; among equal ones the lower,
    none of -Inf."""
    order = score_CS.sort(dim=1, descending=True, stable=True)
    none = score_CS.shape[1]
    best_CK = order.indices[:, :count].masked_fill(order.values[:, :count] == float("-inf"), none)
    best_CK = best_CK.sort(dim=1).values
    return best_CK.masked_fill(best_CK == none, -1)


def _entries_of(block_TC: torch.Tensor, spec: BlockSpec | None) -> torch.Tensor:
    """The entries of blocks, -1 of none."""
    assert spec is not None, "a layer that is bound to blocks knows their size"
    within = torch.arange(spec.entries, device=block_TC.device)
    entry_TCS = block_TC[:, :, None] * spec.entries + within
    return entry_TCS.masked_fill(block_TC[:, :, None] < 0, -1).flatten(1)
