"""A deterministic fake of the whole back, without torch: the core, the server and the host's cost
are tested on it.

A row's running state is a polynomial hash of all its tokens; the token it samples is a keyed hash
of (state, position, seed). The state after every token is also written to a fake KV cache, block by
block and group by group, and a row that starts behind a prefix hit reads its state from there: a
wrong block table, a block freed too early or a stale hit shows as wrong tokens. With `check` every
plan is held against its invariants as well, and everything a row may attend to is compared with
what its tokens say; that costs time in proportion to the context and is meant for tests.

    state_i = state_(i-1) * B + token_i + 1   (mod 2^64)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.back.executor.null_memory import GROUP_MARK, NullMemory
from headrace.back.executor.null_pooling import NullPooling
from headrace.base import splitmix
from headrace.base.config.resolved import EngineSpec, max_forward_tokens
from headrace.base.errors import (
    EngineDead,
    EngineError,
    InvalidRequest,
    NonFiniteLogits,
    WireError,
    to_wire,
)
from headrace.base.wire.grammar import GRAMMAR_HOOK, NOTHING, unpack_masks
from headrace.base.wire.pooling import Pooled
from headrace.base.wire.request import PromptLogprobs
from headrace.base.wire.step import (
    KVGroup,
    RecordedGraphs,
    RowFeed,
    RowLogprobs,
    RowStart,
    StepPlan,
    StepResult,
    WorkerFacts,
)

Int32 = npt.NDArray[np.int32]

_BASE = splitmix.GAMMA
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_KEY = 0x5851F42D4C957F2D
_ONE_IN = 1 << 20
DEFAULT_BLOCKS = 4096


@dataclass(frozen=True, kw_only=True)
class NullBehaviour:
    """How the fake behaves. `eos_rate`: chance of an end token per token; `step_s` and `token_s`:
    simulated time of a step and of each of its tokens; `fails(request, position)`: that row's
    sample fails; `dies_at`: the step that fails as a whole; `hangs_at`: that which never ends."""

    eos_rate: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    fails: Callable[[int, int], bool] | None = None
    dies_at: int | None = None
    hangs_at: int | None = None
    accepts: Callable[[int, int], int] | None = None


class NullPending:
    """A step that is done at a given time (monotonic clock; None: never), or that failed.

    One whose plan defers inputs has no result before they are sent.
    """

    def __init__(self, result: StepResult | EngineError | None, due: float | None) -> None:
        self._result = result
        self._due = due

    def finish(self, result: StepResult) -> None:
        """The result of a step whose deferred inputs have come."""
        self._result = result

    def done(self) -> bool:
        """See Pending."""
        ready = self._result is not None and self._due is not None
        return ready and time.monotonic() >= (self._due or 0.0)

    def result(self, timeout_s: float | None = None) -> StepResult:
        """See Pending."""
        left = float("inf") if self._due is None else self._due - time.monotonic()
        if timeout_s is not None and left > timeout_s:
            time.sleep(timeout_s)
            raise TimeoutError
        if left > 0:
            time.sleep(left)
        if isinstance(self._result, EngineError):
            raise self._result
        assert self._result is not None, "waits for a step whose deferred inputs were never sent"
        return self._result


@dataclass(slots=True)
class _Row:
    start: RowStart
    computed: int
    seen: list[int]
    pooling: NullPooling | None


class NullExecutor:
    """Fakes the workers of `spec`. Unless given, `groups` follow from the model's config
    (layer_types and sliding_window) and the behaviour from its keys null_eos_rate and
    null_step_s."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        behaviour: NullBehaviour | None = None,
        groups: Sequence[KVGroup] | None = None,
        check: bool = False,
    ) -> None:
        self._model = spec.model
        config = spec.model.config
        self.behaviour = behaviour or NullBehaviour(
            eos_rate=float(config.get("null_eos_rate", 0.0)),
            step_s=float(config.get("null_step_s", 0.0)),
        )
        self._facts = _facts_of(spec, tuple(groups) if groups is not None else _groups_of(config))
        self._max_step_tokens = spec.scheduler.max_step_tokens
        self._max_forward_tokens = max_forward_tokens(spec)
        self._eos = np.asarray(spec.model.eos_ids or (0,), np.int64)
        self._check = check
        facts = self._facts
        self._block_tokens = facts.block_tokens
        longest = max(
            [facts.max_model_len, *(g.span or 0 for g in facts.groups if g.kind == "cross")]
        )
        shape = (len(facts.groups), facts.max_rows, -(-longest // facts.block_tokens))
        self._table = np.zeros(shape, np.int32)
        self._memory = NullMemory(facts)
        self._rows: list[_Row | None] = [None] * facts.max_rows
        self._state = np.zeros(facts.max_rows, np.uint64)
        self._input = np.zeros(facts.max_rows, np.int64)
        self._seed = np.zeros(facts.max_rows, np.uint64)
        self._computed = np.zeros(facts.max_rows, np.int32)
        self._ahead = np.zeros(facts.max_rows, np.int32)
        self._special = np.zeros(facts.max_rows, np.bool_)
        self._powers = _Powers()
        self._due = 0.0
        self._held: tuple[StepPlan, NullPending] | None = None
        self._dead: EngineError | None = None
        self.num_steps = 0

    @property
    def facts(self) -> WorkerFacts:
        """See Executor."""
        return self._facts

    def profile(self, folder: str | None) -> list[str]:
        """See Executor."""
        raise InvalidRequest("the null executor has no workers to profile")

    def record_graph(self) -> RecordedGraphs:
        """See Executor."""
        return RecordedGraphs()

    def park(self) -> None:
        """See Executor."""
        self._rows = [None] * self._facts.max_rows
        self._table[:] = 0

    def unpark(self) -> None:
        """See Executor."""

    def log_level(self, level: str) -> None:
        """See Executor."""

    def check(self) -> None:
        """See Executor."""
        if self._dead is not None:
            raise self._dead

    def close(self) -> None:
        """See Executor."""

    def submit(self, plan: StepPlan) -> NullPending:
        """See Executor. The step is computed at once and handed out when its simulated time is
        over."""
        self.check()
        self.num_steps += 1
        if self.behaviour.dies_at == self.num_steps:
            self._dead = EngineDead("a worker died (injected)")
            return NullPending(self._dead, time.monotonic())
        self._apply(plan)
        if self._check:
            self._check_rows(plan)
        assert self._held is None, "a step after one whose deferred inputs were never sent"
        result = None if plan.deferred else self._run(plan, {})
        spent = self.behaviour.step_s + self.behaviour.token_s * int(plan.num_tokens.sum())
        self._due = max(self._due, time.monotonic()) + spent if spent else 0.0
        hangs = self.behaviour.hangs_at == self.num_steps
        pending = NullPending(result, None if hangs else self._due)
        if plan.deferred:
            self._held = plan, pending
        return pending

    def send_deferred(self, step: int, payloads: dict[str, memoryview]) -> None:
        """See Executor."""
        assert self._held is not None and self._held[0].step == step, "nothing waits for this"
        (plan, pending), self._held = self._held, None
        pending.finish(self._run(plan, payloads))

    # rows and blocks

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.ends.tolist():
            assert self._rows[row] is not None, f"row {row} ends but nobody has it"
            self._rows[row] = None
            self._table[:, row] = 0
        for start in plan.starts:
            self._start(start)
        for feed in plan.feeds:
            self._feed(feed)
        if len(plan.block_id):
            most = np.asarray([_num_ids(self._facts, group) for group in self._facts.groups])
            assert plan.block_id.min() >= 0
            assert (plan.block_id < most[plan.block_group]).all(), "a block that there is not"
            for row in np.unique(plan.block_row).tolist():
                assert self._rows[row] is not None, f"a block for row {row}, but nobody has it"
            self._table[plan.block_group, plan.block_row, plan.block_index] = plan.block_id
        for start in plan.starts:
            self._memory.write_cross(self._table, start)
            self._state[start.row] = self._state_at(start.row, start.num_computed)

    def _start(self, start: RowStart) -> None:
        row, known = start.row, len(start.tokens)
        assert self._rows[row] is None, f"row {row} is taken twice"
        assert 0 <= start.num_computed < known and 0 < start.num_prompt <= known
        seen = start.tokens[: start.num_computed].tolist() if self._check else []
        asked = start.pooling
        pooling = asked and NullPooling(self._model, asked, start.num_prompt)
        self._rows[row] = _Row(start, start.num_computed, seen, pooling)
        self._computed[row] = start.num_computed
        self._ahead[row] = 0
        sampling = start.sampling
        self._seed[row] = 0 if sampling.greedy else splitmix.mix(sampling.seed)
        self._special[row] = (
            sampling.allowed_ids is not None
            or bool(sampling.suppressed_ids and sampling.min_tokens)
            or sampling.logprobs is not None
        )

    def _feed(self, feed: RowFeed) -> None:
        """The row knows its tokens up to the end of these; what it sampled before them is only
        known here."""
        owner = self._owner(feed.row)
        assert self._computed[feed.row] == feed.start, "a feed begins where the KV ends"
        gap = feed.start - len(owner.start.tokens)
        known = np.concatenate([owner.start.tokens, np.zeros(max(gap, 0), np.int32)])
        tokens = np.concatenate([known[: feed.start], feed.tokens])
        owner.start = msgspec.structs.replace(owner.start, tokens=tokens)

    def _state_at(self, row: int, position: int) -> int:
        """The state before `position`, read from the KV cache as a kernel would."""
        if position == 0:
            return 0
        state = self._memory.state_before(self._table, row, position)
        if state is None:  # no group reads that far back
            tokens = self._owner(row).start.tokens[:position]
            return int(self._powers.states(0, tokens)[-1])
        return state

    def _owner(self, row: int) -> _Row:
        owner = self._rows[row]
        assert owner is not None, f"row {row} runs but nobody has it"
        return owner

    # running

    def _run(self, plan: StepPlan, payloads: dict[str, memoryview]) -> StepResult:
        rows = plan.rows
        prompts: list[tuple[int, PromptLogprobs]] = []
        pooled: list[tuple[int, Pooled]] = []
        drafts = plan.drafts if len(plan.drafts) else np.zeros_like(plan.num_tokens)
        decoding = plan.num_tokens == 1 + drafts
        for index in np.flatnonzero(decoding).tolist():
            row = int(rows[index])
            if self._computed[row] < len(self._owner(row).start.tokens):
                decoding[index] = False
        self._decode(rows[decoding], self._computed[rows[decoding]])
        for index in np.flatnonzero(~decoding).tolist():
            self._prefill(index, plan, prompts, pooled)
        self._computed[rows] += plan.num_tokens - drafts
        masks = payloads.get(GRAMMAR_HOOK, NOTHING)
        sampled = np.flatnonzero(plan.sample)
        tokens, logprobs, failed = self._sample(rows, sampled, masks)
        columns = [tokens]
        drafted = np.zeros_like(drafts)
        if drafts.any():
            drafted, accepted = self._accepted(rows, drafts)
            before = self._computed[rows]
            for place in range(1, 1 + int(accepted.max())):
                sampled = np.flatnonzero((accepted >= place) & (columns[-1] >= 0))
                at = rows[sampled]
                self._decode(at, self._computed[at])
                self._computed[at] += 1
                more, scores, worse = self._sample(rows, sampled, NOTHING, place=place)
                columns.append(more)
                logprobs, failed = logprobs + scores, failed + worse
            kept = self._computed[rows] - before
            self._ahead[rows] += drafts - kept
            self._spoil(rows, drafts - kept)
        return StepResult(
            step=plan.step,
            tokens=np.stack(columns, axis=1),
            drafted=drafted if len(plan.drafts) else plan.drafts,
            logprobs=logprobs,
            prompt_logprobs=prompts,
            pooled=pooled,
            failed=failed,
        )

    def _accepted(self, rows: Int32, drafts: Int32) -> tuple[Int32, Int32]:
        """Drafts proposed of each row, and those of them that stand: as the behaviour says, and
        never behind a token that nothing may follow."""
        accepts = self.behaviour.accepts
        if accepts is None:
            return np.zeros_like(drafts), np.zeros_like(drafts)
        wanted = [
            accepts(self._owner(row).start.request, int(self._computed[row]))
            for row in rows.tolist()
        ]
        return drafts, np.minimum(np.asarray(wanted, np.int32), drafts)

    def _spoil(self, rows: Int32, rejected: Int32) -> None:
        """What does not stand has left its KV, which must be written again before it is read."""
        rows, first = np.repeat(rows, rejected), np.repeat(self._computed[rows], rejected)
        behind = np.arange(len(rows)) - np.repeat(np.cumsum(rejected) - rejected, rejected)
        if len(rows):
            spoilt = np.full(len(rows), _KEY, np.uint64)
            self._memory.write(self._table, rows, first + behind, spoilt)

    def _decode(self, rows: Int32, position: Int32) -> None:
        if not len(rows):
            return
        self._memory.load_snapshots(self._table, rows, position, self._state)
        tokens = self._input[rows]
        self._state[rows] = self._state[rows] * np.uint64(_BASE) + (tokens + 1).astype(np.uint64)
        self._memory.write(self._table, rows, position, self._state[rows])
        self._memory.save_snapshots(self._table, rows, position + 1, self._state)
        if self._check:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self._owner(row).seen.append(token)

    def _prefill(
        self,
        index: int,
        plan: StepPlan,
        prompts: list[tuple[int, PromptLogprobs]],
        pooled: list[tuple[int, Pooled]],
    ) -> None:
        row, first = int(plan.rows[index]), int(plan.num_computed[index])
        owner, end = self._owner(row), first + int(plan.num_tokens[index])
        assert end <= len(owner.start.tokens), f"row {row}: tokens nobody knows"
        tokens = owner.start.tokens[first:end]
        place = np.asarray([row], np.int32)
        self._memory.load_snapshots(self._table, place, np.asarray([first]), self._state)
        states = self._powers.states(int(self._state[row]), tokens)
        self._state[row] = states[-1]
        position = np.arange(first, end)
        self._memory.write(self._table, np.full(len(position), row), position, states)
        self._memory.save_snapshots(self._table, place, np.asarray([end]), self._state)
        if self._check:
            owner.seen.extend(tokens.tolist())
        if (
            owner.pooling is not None
            and (pooled_states := owner.pooling.take(states, first)) is not None
        ):
            pooled.append((index, pooled_states))
        self._score_prompt(index, owner, first, end, prompts)

    def _score_prompt(
        self,
        index: int,
        owner: _Row,
        first: int,
        end: int,
        prompts: list[tuple[int, PromptLogprobs]],
    ) -> None:
        count = owner.start.sampling.prompt_logprobs
        scored = owner.start.tokens[first + 1 : min(end + 1, owner.start.num_prompt)]
        if count is None or not len(scored):
            return
        width = self._facts.logits_width
        columns = 1 + (count if count >= 0 else width - 1)
        ids = (scored[:, None].astype(np.int64) + np.arange(columns)) % width
        values = np.broadcast_to(-0.5 - np.arange(columns, dtype=np.float32), ids.shape)
        ranks = np.ones(len(scored), np.int32)
        scores = PromptLogprobs(first + 1, ids.astype(np.int32), np.array(values), ranks)
        prompts.append((index, scores))

    # sampling

    def _sample(
        self, rows: Int32, sampled: npt.NDArray[np.intp], masks: memoryview, *, place: int = 0
    ) -> tuple[Int32, list[RowLogprobs], list[tuple[int, WireError]]]:
        """The tokens of the step's rows, -1 but for those at `sampled`; `place`: of how many-th
        token."""
        at, tokens = rows[sampled], np.full(len(rows), -1, np.int64)
        position = self._computed[at]
        tokens[sampled] = self._sample_rows(at, position)
        logprobs: list[RowLogprobs] = []
        special = sampled[self._special[at]].tolist()
        for index in special:
            row = int(rows[index])
            tokens[index] = self._constrain(row, int(self._computed[row]), int(tokens[index]))
        self._mask(rows, tokens, masks)
        for index in special:
            scores = self._scores(index, int(rows[index]), int(tokens[index]))
            logprobs += [msgspec.structs.replace(score, place=place) for score in scores]
        failed = self._inject(rows, sampled) if self.behaviour.fails is not None else []
        for index, _ in failed:
            tokens[index] = -1
        self._input[at] = tokens[sampled]
        return tokens.astype(np.int32), logprobs, failed

    def _sample_rows(self, rows: Int32, position: Int32) -> npt.NDArray[np.int64]:
        x = self._state[rows] ^ self._seed[rows] ^ np.uint64(_KEY)
        x = splitmix.mix_all(x + position.astype(np.uint64) * np.uint64(GROUP_MARK))
        width = np.uint64(self._facts.logits_width)
        tokens = (x % width).astype(np.int64)
        ended = (x >> np.uint64(40)) % np.uint64(_ONE_IN) < np.uint64(
            int(self.behaviour.eos_rate * _ONE_IN)
        )
        accidental = np.isin(tokens, self._eos)
        for index in np.flatnonzero(accidental).tolist():
            tokens[index] = _next_allowed(int(tokens[index]), set(self._eos.tolist()), int(width))
        tokens[ended] = self._eos[0]
        return tokens

    def _constrain(self, row: int, position: int, token: int) -> int:
        start = self._owner(row).start
        sampling = start.sampling
        early = position - start.num_prompt < sampling.min_tokens
        banned = set(sampling.suppressed_ids) if early else set()
        if sampling.allowed_ids is not None:
            allowed = sorted(set(sampling.allowed_ids) - banned) or sorted(sampling.allowed_ids)
            return allowed[token % len(allowed)]
        return _next_allowed(token, banned, self._facts.logits_width)

    def _mask(self, rows: Int32, tokens: npt.NDArray[np.int64], payload: memoryview) -> None:
        """Tokens that the grammar does not allow become allowed ones."""
        if not payload:
            return
        place = {row: index for index, row in enumerate(rows.tolist())}
        newest = unpack_masks(payload).of_newest()
        for row, words in zip(newest.rows.tolist(), newest.masks.view(np.uint32), strict=True):
            token = int(tokens[place[row]])
            if not int(words[token >> 5]) >> (token & 31) & 1:
                allowed = np.flatnonzero(words)
                at = int(allowed[token % len(allowed)])
                word = int(words[at])
                bits = [bit for bit in range(32) if word >> bit & 1]
                tokens[place[row]] = 32 * at + bits[token % len(bits)]

    def _scores(self, index: int, row: int, token: int) -> list[RowLogprobs]:
        sampling = self._owner(row).start.sampling
        if (count := sampling.logprobs) is None:
            return []
        width = self._facts.logits_width
        count %= width
        ids = [(token + i) % width for i in range(1 + count)] + list(sampling.logprob_ids)
        values = -0.5 - np.arange(len(ids), dtype=np.float32)
        return [RowLogprobs(index, np.asarray(ids, np.int32), values, 1, 0, np.int32([token]))]

    def _inject(self, rows: Int32, sampled: npt.NDArray[np.intp]) -> list[tuple[int, WireError]]:
        fails = self.behaviour.fails
        assert fails is not None
        error = to_wire(NonFiniteLogits("the logits of this request are not finite (injected)"))
        return [
            (index, error)
            for index, row in zip(sampled.tolist(), rows[sampled].tolist(), strict=True)
            if fails(self._owner(row).start.request, int(self._computed[row]))
        ]

    # the oracle

    def _check_rows(self, plan: StepPlan) -> None:
        """Holds the plan against what StepPlan promises."""
        rows, ones = plan.rows.tolist(), plan.num_tokens == 1
        assert len(rows) and len(set(rows)) == len(rows), "a row runs twice"
        drafts = plan.drafts if len(plan.drafts) else np.zeros_like(plan.num_tokens)
        assert (plan.num_tokens > drafts).all() and (drafts >= 0).all(), "drafts behind no token"
        assert (plan.num_tokens - drafts).sum() <= self._max_step_tokens
        assert plan.num_tokens.sum() <= self._max_forward_tokens
        assert not (ones[1:] & ~ones[:-1]).any(), "rows with one token come first"
        bound = self._computed[plan.rows] + self._ahead[plan.rows]
        assert (bound >= plan.num_computed).all(), "num_computed is too great"
        assert (self._computed[plan.rows] <= plan.num_computed).all(), "num_computed is too small"
        holders = self._holders()
        for index, row in enumerate(rows):
            first, count = int(self._computed[row]), int(plan.num_tokens[index])
            self._check_row(row, first, first + count, holders)
            known = len(self._owner(row).start.tokens)
            if first + count < known:
                assert not plan.sample[index], "samples inside a prompt"

    def _holders(self) -> list[npt.NDArray[np.int64]]:
        """How often each block of a group stands in the tables of rows that are taken."""
        taken = [row for row, owner in enumerate(self._rows) if owner is not None]
        self._memory.check_slabs(self._table[:, taken])
        return [np.bincount(held[taken].ravel()).astype(np.int64) for held in self._table]

    def _check_row(
        self, row: int, first: int, end: int, holders: list[npt.NDArray[np.int64]]
    ) -> None:
        """Blocks that are written belong to this row alone; all that may be read holds what the
        tokens say."""
        owner = self._owner(row)
        assert len(owner.seen) == first, (row, len(owner.seen), first)
        states = self._powers.states(0, np.asarray(owner.seen, np.int64))
        for group, spec in enumerate(self._facts.groups):
            if spec.kind == "cross":
                self._memory.check_cross(self._table, owner.start)
            elif spec.kind != "state":
                size = self._block_tokens * spec.block_ratio
                written = self._table[group, row, first // size : (end - 1) // size + 1]
                assert written.all(), f"row {row} writes to the null block"
                assert (holders[group][written] == 1).all(), f"row {row} writes to others' blocks"
                self._memory.check_read(self._table, group, row, states, first)


class _Powers:
    """Powers of B and of its inverse, grown on demand, and the states over a run of tokens."""

    def __init__(self) -> None:
        self._power = np.ones(1, np.uint64)
        self._inverse = np.ones(1, np.uint64)

    def states(self, before: int, tokens: npt.NDArray[np.integer]) -> splitmix.U64:
        """The state after each of `tokens`, from the state `before` them."""
        count = len(tokens)
        while len(self._power) <= count:
            size = len(self._power)
            self._power = _doubled(self._power, pow(_BASE, size, 1 << 64))
            self._inverse = _doubled(self._inverse, pow(_BASE_INVERSE, size, 1 << 64))
        terms = (tokens.astype(np.int64) + 1).astype(np.uint64) * self._inverse[1 : count + 1]
        sums = np.cumsum(terms, dtype=np.uint64) + np.uint64(before)
        return sums * self._power[1 : count + 1]


def _doubled(powers: splitmix.U64, factor: int) -> splitmix.U64:
    return np.concatenate([powers, powers * np.uint64(factor)])


def _next_allowed(token: int, banned: set[int], width: int) -> int:
    for step in range(width):
        if (token + step) % width not in banned:
            return (token + step) % width
    return token


def _groups_of(config: dict[str, object]) -> tuple[KVGroup, ...]:
    """The KV groups that a config.json with these keys would have."""
    count = config.get("num_hidden_layers", 1)
    window, types = config.get("sliding_window"), config.get("layer_types")
    assert isinstance(count, int)
    if not isinstance(types, list) or not isinstance(window, int):
        return (KVGroup(kind="full", caches=tuple(range(count))),)
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    rest = tuple(i for i, kind in enumerate(types) if kind != "full_attention")
    groups = [KVGroup(kind="full", caches=full)] if full else []
    if rest:
        groups.append(KVGroup(kind="window", caches=rest, span=window))
    return tuple(groups)


def _num_ids(facts: WorkerFacts, group: KVGroup) -> int:
    """How many block ids the group has."""
    if group.kind == "state":
        return max(1, group.num_slots)
    return facts.num_blocks * group.blocks_per_slab


def _facts_of(spec: EngineSpec, groups: tuple[KVGroup, ...]) -> WorkerFacts:
    return WorkerFacts(
        num_blocks=spec.kv.num_blocks or DEFAULT_BLOCKS,
        block_tokens=spec.kv.block_tokens,
        groups=groups,
        logits_width=spec.model.logits_width,
        max_rows=spec.scheduler.max_running,
        max_model_len=spec.model.max_model_len,
        max_drafts=0 if spec.speculation is None else spec.speculation.num_tokens,
    )
