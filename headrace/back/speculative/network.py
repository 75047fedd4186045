"""Drafters with weights: what a network must give, and how it is run inside the step.

A network's caches lie behind the model's own, in the same blocks and tables: what is written for a
position there is written for it here, so that prefix hits, preemption and chunked prompts need
nothing more. At position p stand the token `shift` places behind it and, where the network is a
head (`shift` 1), the model's hidden state at p. So a step is followed once its tokens are chosen:

    propose   pass by pass, in front of the model: draft i is a token of pass i (draft_tokens.py),
              and is what pass i + 1 reads. A head's first draft comes from what it kept of the step
              before
    follow    all tokens of the step at once, behind it: the caches, and what heads keep by row

A network that drafts a whole block reads in one pass the newest token and a mask for each place
behind it (`BlockDrafts`): each place is a row of its own in that pass, so that the attention of
decodes serves it, and what a place sees is its row's length. Which tokens a block's hidden states
stand for may hang on the drafts before them (`ChainedChoice`). Heads without caches draft all at
once from what was kept, and read nothing.

Keys that a rejected draft leaves behind are written again by the step that reaches their position,
as the model's are. A position that was not followed (too many rows ran) has whatever lay there:
such rows propose nothing where the host can tell, and bad drafts elsewhere. Both cost time alone.

R rows, T query tokens, M rows of the runner, E the network's width, X what it sees of the model,
Q places of all rows' blocks, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import LAST, AttentionPlan, Batch
from headrace.back.kernels.draft_rows.op import (
    BLOCK_OP,
    FOLLOW_OP,
    INPUTS_OP,
    KEEP_OP,
    PUT_OP,
    TAKE_OP,
    DraftInputs,
    DraftRowsProblem,
)
from headrace.back.kernels.norm_columns.op import OP as NORM_COLUMNS
from headrace.back.kernels.norm_columns.op import NormColumnsProblem
from headrace.back.kernels.op import decisions
from headrace.back.kernels.step_inputs.op import StepTables
from headrace.back.speculative.draft_tokens import DraftSampling, draft_tokens
from headrace.base.config.resolved import Decision


class ChainedChoice(Protocol):
    """How the drafts of a block are chosen one after the other, each knowing the one before."""

    def behind(self, logits_RV: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
        """What each row says behind `token_R`, int64 [R], at a place that says these logits by
        itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class BlockDrafts:
    """How a network drafts in one pass. `mask`: the token at places that are to be drafted.
    `whole`: each place sees all of its row's, else those up to itself. `ahead`: each says the token
    behind it, else the one where it stands. `choice`: how tokens are chosen of what a block gives;
    None: each by itself, the best."""

    mask: int
    whole: bool
    ahead: bool
    choice: ChainedChoice | None = None

    @property
    def more(self) -> int:
        """Places of a row beyond its drafts."""
        return 1 if self.whole else 0


class DraftNetwork(Protocol):
    """A network that drafts, loaded on this rank.

    shift      places between a position of its caches and the token read there: 0 or 1
    taps       in front of which layers of the model it sees hidden states, or (LAST,); empty:
               nowhere
    width      E; what it sees at each place is as wide
    kv_forms   its caches, numbered from 0
    kept       width of what is kept of a row (heads), and that a pass hands to the next
    chained    whether a pass reads the draft of the one before; else all come of what was kept
    block      drafts come of one pass over a block; None: pass by pass
    offset_D   int64 [D]: what is added to a token of its own vocabulary to have the model's; None:
               they are the same
    """

    shift: int
    taps: tuple[int, ...]
    width: int
    dtype: torch.dtype
    kv_forms: tuple[CacheForm, ...]
    kept: int
    chained: bool
    block: BlockDrafts | None
    offset_D: torch.Tensor | None

    def follow(
        self, token_T: torch.Tensor, seen_TX: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Writes the caches of a step's tokens; hidden states [T, E], or of each row's last token
        where the batch goes on with these alone."""
        ...

    def draft(
        self, token_R: torch.Tensor, hidden_RE: torch.Tensor | None, batch: Batch, number: int
    ) -> torch.Tensor:
        """The pass for the draft of this number (from 0 on) over one token of each row, behind one
        that gave `hidden_RE`; its own [R, kept]. Over a block: over all its places, [Q * R, E]."""
        ...

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """The best token of each row, int64 [R], of its own vocabulary, for the draft of this
        number (from 0 on); of a block, of all drafts at once."""
        ...

    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """What `top` is the best of, float32 [R, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class NetworkPlace:
    """Where a network works: the caches of model and network, the group of each, and how many are
    the model's; sizes of the runner. `sampling`: drafts are sampled; None: the best tokens."""

    kv: tuple[torch.Tensor, ...]
    group_of_cache: tuple[int, ...]
    model_caches: int
    block_tokens: int
    max_rows: int
    max_tokens: int
    device: torch.device
    sampling: DraftSampling | None = None


class SeenStates:
    """`HiddenTaps` that keep what they see, side by side: `seen_TX`, of the step that ran last."""

    def __init__(self, network: DraftNetwork, place: NetworkPlace) -> None:
        width = network.width
        problem = NormColumnsProblem(
            device=place.device.type, dtype=network.dtype, width=width, eps=None
        )
        self.layers = frozenset(network.taps)
        self._columns = {layer: i * width for i, layer in enumerate(network.taps)}
        self._put = NORM_COLUMNS.choose(problem).bind(None)
        shape = place.max_tokens, len(network.taps) * width
        self._seen = torch.zeros(shape, dtype=network.dtype, device=place.device)

    def see(
        self, layer: int, hidden_TE: torch.Tensor, branch_TE: torch.Tensor | None = None
    ) -> None:
        """See HiddenTaps."""
        seen_TX = self._seen[: hidden_TE.shape[0]]
        self._put(hidden_TE, seen_TX, self._columns[layer], branch_TE)

    def first(self, count: int) -> torch.Tensor:
        """Of so many tokens."""
        return self._seen[:count]


class NetworkDrafter:
    """A `Drafter` by a network. See the top of the file."""

    follows = True

    def __init__(self, network: DraftNetwork, place: NetworkPlace, *, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._network, self._place = network, place
        self.taps = SeenStates(network, place) if network.taps else None
        self.last_hidden = LAST in network.taps
        problem = DraftRowsProblem(
            device=place.device.type, block_tokens=place.block_tokens, shift=network.shift
        )
        ops = FOLLOW_OP, KEEP_OP, TAKE_OP, PUT_OP, INPUTS_OP if network.block is None else BLOCK_OP
        choices = [op.choose(problem) for op in ops]
        self._take_tokens, self._keep, self._take, self._put, self._inputs = (
            choice.bind() for choice in choices
        )
        self._tokens = draft_tokens(network, place.device, place.sampling)
        self._chosen = (*decisions(choices), *self._tokens.decisions)
        new = {"dtype": network.dtype, "device": place.device}
        rows = place.max_rows + 1
        self._state_ME = torch.zeros(rows, network.kept, **new)
        self._token_T = torch.zeros(place.max_tokens, dtype=torch.int64, device=place.device)
        self._out: dict[tuple[int, int], tuple[DraftInputs, Batch]] = {}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """See Drafter."""
        return self._chosen

    def start(self, row: int) -> None:
        """See Drafter: what is kept by row is written again by the row's first step."""
        self._tokens.start()

    def reach(self, length_R: torch.Tensor) -> torch.Tensor:
        """Up to the end of the block that its last pass wrote to."""
        network = self._network
        if not network.kv_forms:
            return torch.full_like(length_R, self.max_drafts)
        room_R = network.shift + -(length_R - 1) % self._place.block_tokens
        return room_R if network.block is None else (room_R - network.block.more).clamp(min=0)

    def follow(
        self,
        batch: Batch,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        positions_T: torch.Tensor,
        tables: StepTables,
    ) -> torch.Tensor:
        """See Drafter."""
        count = positions_T.shape[0]
        token_T = self._token_T[:count]
        self._take_tokens(row_R, query_start_R1, positions_T, tables, token_T)
        seen_TX = None if self.taps is None else self.taps.first(count)
        own = self._own(batch, token_T, positions_T)
        hidden = self._network.follow(token_T, seen_TX, own)
        if self._network.shift:
            self._keep(row_R, query_start_R1, positions_T, tables, hidden, self._state_ME)
        return hidden

    def _own(self, batch: Batch, token_T: torch.Tensor, positions_T: torch.Tensor) -> Batch:
        """The step as the network sees it: its own caches and tokens."""
        first, place = self._place.model_caches, self._place
        caches = {"kv": place.kv[first:], "group_of_layer": place.group_of_cache[first:]}
        after = batch.last_token_batch
        return Batch(
            token_ids_T=token_T,
            positions_T=positions_T,
            plans=batch.plans,
            logits_at_N=batch.logits_at_N,
            row_R=batch.row_R,
            query_start=batch.query_start,
            encoded_behind=batch.encoded_behind,
            last_token_batch=None if after is None else replace(after, taps=None, **caches),
            **caches,
        )

    def propose(
        self,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        count_M: torch.Tensor,
        most: int,
    ) -> None:
        """See Drafter. Every row is given what it wants."""
        self.passes(row_R, query_start_R1, tables, most)
        wanted_R = (query_start_R1[1:] - query_start_R1[:-1] - 1).clamp_(min=0)
        count_M.index_copy_(0, row_R.long(), wanted_R.to(count_M.dtype))

    def passes(
        self, row_R: torch.Tensor, query_start_R1: torch.Tensor, tables: StepTables, most: int
    ) -> torch.Tensor:
        """See Drafter."""
        if self._network.block is not None:
            return self._block_pass(self._network.block, row_R, query_start_R1, tables, most)
        network, rows = self._network, row_R.shape[0]
        hidden_RE: torch.Tensor | None = None
        if network.shift:
            hidden_RE = self._state_ME.new_empty(rows, network.kept)
            self._take(row_R, self._state_ME, hidden_RE)
        out, batch = self._pass_inputs(rows, tables)
        for i in range(most):
            if (i or hidden_RE is None) and network.chained:
                self._inputs(row_R, query_start_R1, tables, out, i)
                hidden_RE = network.draft(out.token_R, hidden_RE, batch, i)
            assert hidden_RE is not None
            token_R = self._tokens.of_pass(hidden_RE, row_R, tables, i)
            self._put(row_R, query_start_R1, token_R, self._tokens.offset_D, tables, i + 1)
        assert hidden_RE is not None
        return hidden_RE

    def _block_pass(
        self,
        block: BlockDrafts,
        row_R: torch.Tensor,
        query_start_R1: torch.Tensor,
        tables: StepTables,
        most: int,
    ) -> torch.Tensor:
        network, rows = self._network, row_R.shape[0]
        out, batch = self._pass_inputs(rows, tables, most + block.more)
        self._inputs(row_R, query_start_R1, tables, out, block.mask, block.more)
        hidden_QE = network.draft(out.token_R, None, batch, 0)
        first = 0 if block.ahead else rows
        drafted_QE = hidden_QE[first:][: rows * most]
        if block.choice is None:
            tokens = self._tokens.of_block(drafted_QE, row_R, tables)
        else:
            newest_R = out.token_R[:rows]
            tokens = self._chained(block.choice, newest_R, drafted_QE, row_R, tables)
        for i, token_R in enumerate(tokens):
            self._put(row_R, query_start_R1, token_R, self._tokens.offset_D, tables, i + 1)
        return hidden_QE

    def _chained(
        self,
        choice: ChainedChoice,
        token_R: torch.Tensor,
        hidden_QE: torch.Tensor,
        row_R: torch.Tensor,
        tables: StepTables,
    ) -> Iterator[torch.Tensor]:
        """The drafts of all rows, place after place, behind each row's newest token."""
        places = self._network.logits(hidden_QE, 0).split(row_R.shape[0])
        for i, logits_RV in enumerate(places):
            token_R = self._tokens.of_logits(choice.behind(logits_RV, token_R), row_R, tables, i)
            yield token_R

    def _pass_inputs(
        self, rows: int, tables: StepTables, places: int = 1
    ) -> tuple[DraftInputs, Batch]:
        """Where passes over so many rows and places of each read: made once for each number."""
        if (rows, places) not in self._out:
            self._out[rows, places] = self._make_inputs(rows * places, tables)
        return self._out[rows, places]

    def _make_inputs(self, rows: int, tables: StepTables) -> tuple[DraftInputs, Batch]:
        place = self._place
        groups, _, columns = tables.blocks_GMB.shape
        long = {"dtype": torch.int64, "device": place.device}
        short = {"dtype": torch.int32, "device": place.device}
        out = DraftInputs(
            token_R=torch.zeros(rows, **long),
            position_R=torch.zeros(rows, **long),
            slots_GR=torch.zeros(groups, rows, **long),
            kv_len_R=torch.ones(rows, **short),
            tables_GRB=torch.zeros(groups, rows, columns, **short),
        )
        start_R1 = torch.arange(rows + 1, **short)
        plans = tuple(
            AttentionPlan(
                query_start_R1=start_R1,
                kv_len_R=out.kv_len_R,
                block_table_RB=table_RB,
                slot_T=slot_R,
                host_query_start=None,
                host_kv_len=None,
                num_decodes=rows,
                max_query_len=1,
                max_kv_len=columns * place.block_tokens,
            )
            for table_RB, slot_R in zip(out.tables_GRB, out.slots_GR, strict=True)
        )
        first = place.model_caches
        batch = Batch(
            token_ids_T=out.token_R,
            positions_T=out.position_R,
            plans=plans,
            group_of_layer=place.group_of_cache[first:],
            kv=place.kv[first:],
            logits_at_N=torch.arange(rows, **long),
        )
        return out, batch
