"""One request inside the core: what it asked for, how far it is, and the states it may go through;
and the running requests as columns.

    WAITING -> PREFILL -> DECODE -> FINISHED
       ^          |          |
       `----- PREEMPTED <----'          (every state but FINISHED may go to FINISHED)

A `Request` is plain data: no closures, no back references, so that a finished one is freed by its
reference count alone. What changes with every token (positions, limits) lies in the `RowTable`
while the request owns a row: numpy columns, so that the steady state (rows that decode) is handled
a column at a time; only a row at a block boundary, a row that may stop or a row with
log-probabilities costs Python work. Nothing here grows with the context: of the tokens only the
newest block is kept per row (`tail`), older ones are flushed to the request.

    position        0 ......... planned-1 | planned ............ length-1
    KV              computed or in flight | not yet scheduled
    tokens          0 .............. known-1 | promised by steps in flight

A step that verifies drafts promises as many tokens as it may bring; what it has not brought is
taken off `num_planned_tokens` and `length` when its result is in, so that both are upper bounds
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from headrace.base.wire.media import MediaSpan
from headrace.base.wire.request import EngineRequest
from headrace.core.adapters import BASE, LoadedAdapter
from headrace.core.repeats import Repeats

TOKEN_BYTES = 4
MAX_PREEMPTION_TIMES = 16
NOT_LOOKED_AT = "new"


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT = {
    RequestState.WAITING: {RequestState.PREFILL, RequestState.FINISHED},
    RequestState.PREFILL: {RequestState.DECODE, RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.DECODE: {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.PREFILL, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """A request the core has accepted.

    Invariants:
    - it holds a row if and only if it is in PREFILL or DECODE, and KV blocks only then (a waiting
      request holds
      nothing that another could wait for, so that no circle of waits can form);
    - `blocks[g]` has one entry per block of positions; 0 where a window group has given the block
      back;
    - no chunk ends within a span of `uncut` (first token, the one behind the last), whose tokens
      see each other;
    - `output` ends at a block boundary of the sequence while the request decodes: the newest tokens
      are in the row
      table; otherwise it holds every token so far.
    """

    wire: EngineRequest
    arrival: int = field(kw_only=True)
    now: InitVar[float] = field(kw_only=True)
    groups: InitVar[int] = field(kw_only=True)
    length_limit: int = field(kw_only=True)
    adapter: LoadedAdapter = field(kw_only=True, default=BASE)
    uncut: tuple[tuple[int, int], ...] = field(kw_only=True, default=())
    num_prompt: int = field(init=False)
    stop_set: frozenset[int] = field(init=False)
    key: tuple[int, ...] = field(init=False)
    state: RequestState = field(init=False, default=RequestState.WAITING)
    since: float = field(init=False)
    reason: str = field(init=False, default=NOT_LOOKED_AT)
    row: int = field(init=False, default=-1)
    output: bytearray = field(init=False, default_factory=bytearray)
    repeats: Repeats | None = field(init=False, default=None)
    media: tuple[MediaSpan, ...] = field(init=False, default=())
    # KV
    blocks: list[list[int]] = field(init=False)
    trimmed: list[int] = field(init=False)
    chain_start: bytes = field(init=False, default=b"")
    chain: list[bytes] = field(init=False, default_factory=list)
    registered: int = field(init=False, default=0)
    registers: bool = field(init=False, default=True)
    prefill_blocks: int = field(init=False, default=0)
    snapshots: list[tuple[int, int, int]] = field(init=False, default_factory=list)
    snapshot_entries: list[tuple[int, int]] = field(init=False, default_factory=list)
    compacted_at: int = field(init=False, default=0)
    # waiting
    passed_over: int = field(init=False, default=0)
    need_blocks: int = field(init=False, default=0)
    looked_at_step: int = field(init=False, default=-1)
    # accounting
    arrived_at: float = field(init=False)
    num_cached: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    num_drafted: int = field(init=False, default=0)
    num_accepted: int = field(init=False, default=0)
    preempted_at: tuple[float, ...] = field(init=False, default=())
    prompt_scored: int = field(init=False, default=0)
    hook_wait_s: float = field(init=False, default=0.0)
    hook_wait_since: float | None = field(init=False, default=None)
    scheduled_at: float | None = field(init=False, default=None)
    first_token_at: float | None = field(init=False, default=None)

    def __post_init__(self, now: float, groups: int) -> None:
        self.arrived_at = self.since = now
        self.num_prompt = len(self.wire.prompt) // TOKEN_BYTES
        self.stop_set = frozenset(self.wire.stop.stop_ids)
        if (rule := self.wire.stop.repetition) is not None:
            self.repeats = Repeats(rule, min_tokens=self.wire.stop.min_tokens)
        if self.wire.media:
            self.media = tuple(one.span() for one in self.wire.media)
        self.key = (self.arrival,)
        self.blocks = [[] for _ in range(groups)]
        self.trimmed = [0] * groups

    @property
    def id(self) -> int:
        """The front's number for it."""
        return self.wire.id

    @property
    def num_tokens(self) -> int:
        """Tokens held here: all of them unless the request decodes."""
        return self.num_prompt + len(self.output) // TOKEN_BYTES

    def least_chunk(self, start: int) -> int:
        """Tokens that a chunk from `start` on has at least."""
        return next((end - start for begin, end in self.uncut if begin <= start < end), 1)

    def whole_chunk(self, start: int, tokens: int) -> int:
        """At most so many tokens from `start` on that the chunk ends within no span of `uncut`; 0:
        there is no such chunk."""
        stop = start + tokens
        begin = next((begin for begin, end in self.uncut if begin < stop < end), stop)
        return max(0, begin - start)

    @property
    def sees_all(self) -> bool:
        """Whether all tokens of the prompt see each other, so that what is kept of any follows
        from all."""
        return bool(self.uncut) and self.uncut[0] == (0, self.num_prompt)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt position must be computed, also one whose KV is cached: prompt
        log-probabilities or hidden states or attention of all tokens are still owed, or what is
        cached follows from all of the prompt."""
        wire = self.wire
        if self.sees_all:
            return True
        if wire.pooling is not None:
            return not wire.pooling.from_last
        if wire.sampling.capture_layers:
            return True
        return wire.sampling.prompt_logprobs is not None and self.prompt_scored < self.num_prompt

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Of a step, for those whose answer was predicted."""
        self.num_drafted += int(drafted)
        self.num_accepted += int(accepted)

    def lose_row(self, reason: str, *, step: int, now: float) -> None:
        """It is preempted in this step; `preempted_at` keeps the first MAX_PREEMPTION_TIMES."""
        self.num_preemptions += 1
        if self.num_preemptions <= MAX_PREEMPTION_TIMES:
            self.preempted_at = (*self.preempted_at, now)
        self.move(RequestState.PREEMPTED, now=now)
        self.reason, self.looked_at_step = reason, step

    def move(self, state: RequestState, *, now: float) -> None:
        """Goes to another state; one that is not allowed from here is our bug."""
        assert state in _NEXT[self.state], f"request {self.id}: {self.state} -> {state}"
        self.state = state
        self.since = now

    def note_hook(self, *, opens: bool, now: float) -> None:
        """A hook was asked: how long one held the request back is told with its end."""
        if opens and self.hook_wait_since is not None:
            self.hook_wait_s += now - self.hook_wait_since
            self.hook_wait_since = None
        elif not opens and self.hook_wait_since is None:
            self.hook_wait_since = now

    def tokens(self) -> npt.NDArray[np.int32]:
        """Every token held here, int32 [num_tokens]."""
        data = self.wire.prompt + bytes(self.output) if self.output else self.wire.prompt
        return np.frombuffer(data, dtype="<i4")

    def token_bytes(self, start: int, end: int) -> bytes:
        """Little-endian bytes of the tokens at positions start .. end-1."""
        first, last, prompt_end = start * TOKEN_BYTES, end * TOKEN_BYTES, len(self.wire.prompt)
        if last <= prompt_end:
            return self.wire.prompt[first:last]
        tail = bytes(self.output[max(first - prompt_end, 0) : last - prompt_end])
        return self.wire.prompt[first:] + tail if first < prompt_end else tail


STOP_COLUMNS = 4
Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


class RowTable:
    """`num_rows` rows; a row's index is its slot in the runner.

    num_planned_tokens   tokens whose KV is computed or in flight
    length      tokens that exist, the promised one included
    num_known_tokens     tokens whose value the core knows
    num_unverified  drafts in flight: by so much the two bounds may be too great
    limit       length at which the request ends ("length")
    stop_from   position from which on stop ids count
    decoding    whether the row decodes (its prompt is computed or in flight)
    stops       [stop, row]: up to STOP_COLUMNS stop ids, -1 elsewhere; `always`: it has more, so
    look at every token
    repeats     row -> what looks at each of its tokens, for the rows that asked for it
    epoch       changes when the row changes hands; a result for an earlier epoch is void
    """

    def __init__(self, num_rows: int, block_tokens: int) -> None:
        self.num_rows = num_rows
        self.block_tokens = block_tokens
        self.requests: list[Request | None] = [None] * num_rows
        self.id = np.zeros(num_rows, np.int64)
        self.epoch = np.zeros(num_rows, np.int32)
        self.num_planned_tokens = np.zeros(num_rows, np.int32)
        self.length = np.zeros(num_rows, np.int32)
        self.num_known_tokens = np.zeros(num_rows, np.int32)
        self.num_unverified = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)
        self.stop_from = np.zeros(num_rows, np.int32)
        self.decoding = np.zeros(num_rows, np.bool_)
        self.always = np.zeros(num_rows, np.bool_)
        self.stops = np.full((STOP_COLUMNS, num_rows), -1, np.int32)
        self.tail = np.zeros((num_rows, block_tokens), np.int32)
        self.repeats: dict[int, Repeats] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows nobody owns."""
        return len(self._free)

    def acquire(self, request: Request, *, computed: int) -> int:
        """Gives the request a row; the KV of its first `computed` tokens is there."""
        row = self._free.pop()
        known = request.num_tokens
        request.row = row
        self.requests[row] = request
        self.id[row] = request.id
        self.num_planned_tokens[row] = computed
        self.length[row] = self.num_known_tokens[row] = known
        self.num_unverified[row] = 0
        self.limit[row] = request.length_limit
        self.stop_from[row] = request.num_prompt + request.wire.stop.min_tokens
        self.decoding[row] = False
        self._set_stops(row, request.wire.stop.stop_ids)
        if request.repeats is not None:
            self.repeats[row] = request.repeats
        begin = known - known % self.block_tokens
        self.tail[row, : known - begin] = np.frombuffer(request.token_bytes(begin, known), "<i4")
        return row

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        self.always[row] = len(stop_ids) > STOP_COLUMNS
        self.stops[:, row] = -1
        if not self.always[row]:
            self.stops[: len(stop_ids), row] = stop_ids

    def release(self, request: Request) -> int:
        """Takes the row back; results of steps in flight for it become void."""
        row = request.row
        assert self.requests[row] is request, (row, request.id)
        self.requests[row] = None
        self.repeats.pop(row, None)
        self.decoding[row] = False
        self.epoch[row] += 1
        self._free.append(row)
        request.row = -1
        return row

    def owner(self, row: int) -> Request:
        """The request that owns a row."""
        request = self.requests[row]
        assert request is not None, row
        return request

    def count_known(self, request: Request) -> int:
        """Tokens of the request whose value is known."""
        return int(self.num_known_tokens[request.row]) if request.row >= 0 else request.num_tokens

    def to_decode(self) -> npt.NDArray[np.intp]:
        """The rows that decode and have not been promised their last token."""
        return (self.decoding & (self.length < self.limit)).nonzero()[0]

    def least_planned(self, row: int) -> int:
        """The least position that the row's next query token may have."""
        return int(self.num_planned_tokens[row] - self.num_unverified[row])

    def settle_drafts(self, rows: Int32, drafts: Int32, accepted: Int32) -> None:
        """A step that promised so many drafts of each row has brought `accepted` of them."""
        rejected = drafts - accepted
        self.num_planned_tokens[rows] -= rejected
        self.length[rows] -= rejected
        self.num_unverified[rows] -= drafts

    def flush_blocks(self, requests: Sequence[Request], blocks: Sequence[bytes]) -> None:
        """The tails of these requests' rows have become full blocks: their outputs move to the
        requests."""
        size = self.block_tokens * TOKEN_BYTES
        for request, block in zip(requests, blocks, strict=True):
            held = len(request.wire.prompt) + len(request.output)
            request.output += block[held % size :]

    def append(self, request: Request, tokens: list[int]) -> None:
        """The row knows these tokens too, beyond those it knew; none is promised. It does not
        decode until their KV is planned."""
        self.flush_rest(request)
        request.output += np.asarray(tokens, "<i4").tobytes()
        row, known = request.row, request.num_tokens
        self.num_known_tokens[row] = self.length[row] = known
        self.decoding[row] = False
        begin = known - known % self.block_tokens
        self.tail[row, : known - begin] = np.frombuffer(request.token_bytes(begin, known), "<i4")

    def flush_rest(self, request: Request) -> None:
        """Moves the outputs that are only in the tail to the request (it is about to lose its
        row)."""
        held, known, row = request.num_tokens, int(self.num_known_tokens[request.row]), request.row
        if held < known:
            begin = held % self.block_tokens
            request.output += self.tail[row, begin : begin + known - held].tobytes()


class RowsInTurns(RowTable):
    """Rows of which a step decodes one of `parts`, in turns, as far as there are so many: so the
    stages of a pipeline compute steps that do not wait for each other's tokens."""

    def __init__(self, num_rows: int, block_tokens: int, *, parts: int = 1) -> None:
        super().__init__(num_rows, block_tokens)
        self.parts, self._turn = parts, 0

    def to_decode(self) -> npt.NDArray[np.intp]:
        """See RowTable."""
        rows = super().to_decode()
        bounds = [part * len(rows) // self.parts for part in range(self.parts + 1)]
        for _ in range(self.parts):
            begin, end = bounds[self._turn : self._turn + 2]
            self._turn = (self._turn + 1) % self.parts
            if begin < end:
                return rows[begin:end]
        return rows
