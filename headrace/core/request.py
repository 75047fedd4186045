"""One request inside the core: what it asked for, how far it is, and the states it may go through.

    WAITING -> PREFILL -> DECODE -> FINISHED
       ^          |          |
       `----- PREEMPTED <----'          (every state but FINISHED may go to FINISHED)

Plain data: no closures, no back references, so that a finished request is freed by its reference
count alone. What changes with every token (positions, limits) lives in `core/rows.py` while the
request owns a row.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from headrace.base.wire.request import EngineRequest
from headrace.core.repeats import Repeats

TOKEN_BYTES = 4
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
    - `output` ends at a block boundary of the sequence while the request decodes: the newest tokens
      are in the row
      table; otherwise it holds every token so far.
    """

    wire: EngineRequest
    arrival: int = field(kw_only=True)
    now: InitVar[float] = field(kw_only=True)
    groups: InitVar[int] = field(kw_only=True)
    length_limit: int = field(kw_only=True)
    num_prompt: int = field(init=False)
    stop_set: frozenset[int] = field(init=False)
    key: tuple[int, ...] = field(init=False)
    state: RequestState = field(init=False, default=RequestState.WAITING)
    since: float = field(init=False)
    reason: str = field(init=False, default=NOT_LOOKED_AT)
    row: int = field(init=False, default=-1)
    output: bytearray = field(init=False, default_factory=bytearray)
    repeats: Repeats | None = field(init=False, default=None)
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

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt position must be computed, also one whose KV is cached: prompt
        log-probabilities or hidden states or attention of all tokens are still owed."""
        wire = self.wire
        if wire.pooling is not None:
            return not wire.pooling.from_last
        if wire.sampling.capture_layers:
            return True
        return wire.sampling.prompt_logprobs is not None and self.prompt_scored < self.num_prompt

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
