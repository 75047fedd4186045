"""One request inside the core: what it asked for, how far it is, and the states it may go through.

    WAITING -> PREFILL -> DECODE -> FINISHED
       ^          |          |
       `----- PREEMPTED <----'          (every state but FINISHED may go to FINISHED)

Plain data: no closures, no back references, so that a finished request is freed by its reference count alone (ENG-13).
What changes with every token (positions, limits) lives in `core/rows.py` while the request owns a row.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from headrace.base.wire.request import EngineRequest

TOKEN_BYTES = 4


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT = {
    State.WAITING: {State.PREFILL, State.FINISHED},
    State.PREFILL: {State.DECODE, State.PREEMPTED, State.FINISHED},
    State.DECODE: {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: {State.PREFILL, State.FINISHED},
    State.FINISHED: set(),
}


class Request:
    """A request the core has accepted.

    Invariants:
    - it holds a row if and only if it is in PREFILL or DECODE, and KV blocks only then (a waiting request holds
      nothing that another could wait for, so that no circle of waits can form);
    - `blocks[g]` has one entry per block of positions; 0 where a window group has given the block back;
    - `output` ends at a block boundary of the sequence while the request decodes: the newest tokens are in the row
      table; otherwise it holds every token so far.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "arrived_at",
        "blocks",
        "chain",
        "chain_start",
        "first_token_at",
        "key",
        "length_limit",
        "looked_at_step",
        "need_blocks",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "output",
        "passed_over",
        "preempted_at",
        "prefill_blocks",
        "prompt_scored",
        "reason",
        "registered",
        "registers",
        "row",
        "scheduled_at",
        "since",
        "state",
        "stop_set",
        "trimmed",
        "wire",
    )

    def __init__(
        self, wire: EngineRequest, *, arrival: int, now: float, groups: int, length_limit: int
    ) -> None:
        self.wire = wire
        self.arrival = arrival
        self.arrived_at = now
        self.since = now
        self.num_prompt = len(wire.prompt) // TOKEN_BYTES
        self.length_limit = length_limit
        self.key: tuple[int, ...] = (arrival,)
        self.state = State.WAITING
        self.reason = "new"
        self.row = -1
        self.output = bytearray()
        self.stop_set = frozenset(wire.stop.stop_ids)
        # KV
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.trimmed = [0] * groups
        self.chain_start = b""
        self.chain: list[bytes] = []
        self.registered = 0
        self.registers = True
        self.prefill_blocks = 0
        # waiting
        self.passed_over = 0
        self.need_blocks = 0
        self.looked_at_step = -1
        # accounting
        self.num_cached = 0
        self.num_preemptions = 0
        self.preempted_at: tuple[float, ...] = ()
        self.prompt_scored = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None

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
        """Whether every prompt position must be computed, also one whose KV is cached: prompt log-probabilities or
        hidden states of all tokens are still owed."""
        wire = self.wire
        if wire.pooling is not None:
            return not wire.pooling.from_last
        return wire.sampling.prompt_logprobs is not None and self.prompt_scored < self.num_prompt

    def move(self, state: State, *, now: float) -> None:
        """Goes to another state; one that is not allowed from here is our bug."""
        assert state in _NEXT[self.state], f"request {self.id}: {self.state} -> {state}"
        self.state = state
        self.since = now

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
