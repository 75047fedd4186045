"""Sums over the ranks through memory that each rank has mapped of all others: no library, no launch
but one.

A message travels as words of 8 bytes: 4 of data, 4 of the call's number, written at once into the
receiver's memory. A word has come when its number is the call's, so there is no flag to set after
the data and no barrier between ranks: a sum takes one crossing of the link (the idea of NCCL's LL
protocol). Memory is used in turn by even and odd calls: who has all words of a call knows that the
others have ended the call before it.

    one shot    every rank sends its row to all others and sums up what comes; the least time for
                short messages
    two shots   rank r sums up the r-th chunk of a row and sends the sum to all; the least bytes for
                longer ones

Both sum in float32 in the order of the ranks and round once: the same bits on every rank and for
either way. The call's number lies on the device and is counted up by the kernel, so calls may be
recorded in a graph. Around the sum, as in kernels/rms_norm: the addition into the residual and the
norm of that.

A rank that waits too long for another stops the device with an error: a lost peer must not hang the
others for ever.

W words (of 4 bytes) of a row, R ranks. Memory of a rank: int64 [2 calls, R + 1 senders, CAPACITY];
the last sender's place takes the sums of the second shot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.back.kernels.triton.grid import enter
from headrace.back.kernels.triton.wrap import DTYPES, interpreted, launch, power_of_two

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ROW_WORDS = 2048
"""Words of a row where a message has none of its own."""
MOST_PROGRAMS = 256
"""So few that all run at the same time: each waits for its like on the other ranks."""
MOST_POLLS = 1 << 27
"""About two minutes."""


@triton.jit
def _values(b_words, KIND: tl.constexpr):
    """The one or two values of a word, in float32; the second of one is 0."""
    if KIND == "fp32":
        b_low = b_words.to(tl.float32, bitcast=True)
        b_high = tl.zeros_like(b_low)
    elif KIND == "bf16":
        b_low = (b_words << 16).to(tl.float32, bitcast=True)
        b_high = (b_words & -65536).to(tl.float32, bitcast=True)
    else:
        b_low = b_words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_high = (b_words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_low, b_high


@triton.jit
def _words(b_low, b_high, KIND: tl.constexpr):
    """The words of rounded values."""
    if KIND == "fp32":
        return b_low.to(tl.int32, bitcast=True)
    if KIND == "bf16":
        b_low16 = b_low.to(tl.bfloat16).to(tl.int16, bitcast=True)
        b_high16 = b_high.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        b_low16 = b_low.to(tl.float16).to(tl.int16, bitcast=True)
        b_high16 = b_high.to(tl.float16).to(tl.int16, bitcast=True)
    return (b_low16.to(tl.int32) & 65535) | (b_high16.to(tl.int32) << 16)


@triton.jit
def _received(p_words, m, number, POLLS: tl.constexpr, TRAP: tl.constexpr):
    """The data of the words, once all of them have come."""
    b = tl.load(p_words, mask=m, other=0, volatile=True)
    polls = 0
    while (tl.max(tl.where(m & ((b >> 32) != number), 1, 0), axis=0) != 0) & (polls < POLLS):
        b = tl.load(p_words, mask=m, other=0, volatile=True)
        polls += 1
    if TRAP:  # noqa: SIM102  a constant of the compiler around a value of the device
        if polls >= POLLS:
            tl.inline_asm_elementwise(
                "trap; mov.u32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
            )
    return b.to(tl.int32)


@triton.jit
def sum_kernel(
    x,
    residual,
    weight,
    y,
    peers,
    calls,
    total_words,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    KIND: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    POLLS: tl.constexpr,
    TRAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (programs). x, residual and y int32 words, rows of W side by side; `peers` int64 [R]
    addresses; `calls` int32 [2]: calls so far, programs that are done. With NORM y = norm(residual
    += sum) * weight, else y = sum."""
    enter(DEPENDENT)
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_rows = tl.cdiv(total_words, WORDS)
    call = tl.load(calls) + 1
    number = tl.cast(call, tl.int64)
    place = (number & 1) * ((RANKS + 1) * CAPACITY)
    mine = tl.load(peers + RANK).to(tl.pointer_type(tl.int64)) + place
    o = tl.arange(0, BLOCK)
    o_chunk = RANK * CHUNK + tl.arange(0, CHUNK_BLOCK)
    for i_row in range(i_program, num_rows, num_programs):
        first = tl.cast(i_row, tl.int64) * WORDS
        m = (o < WORDS) & (first + o < total_words)
        b_words = tl.load(x + first + o, mask=m, other=0)
        b_sent = (b_words.to(tl.int64) & 0xFFFFFFFF) | (number << 32)
        if TWO_SHOT:
            b_peer = tl.load(peers + tl.minimum(o // CHUNK, RANKS - 1))
            p_sent = b_peer.to(tl.pointer_type(tl.int64)) + place + RANK * CAPACITY + first + o
            tl.store(p_sent, b_sent, mask=m, cache_modifier=".wt")
        else:
            for r in tl.static_range(RANKS):
                if r != RANK:
                    p_peer = tl.load(peers + r).to(tl.pointer_type(tl.int64)) + place
                    p_sent = p_peer + RANK * CAPACITY + first + o
                    tl.store(p_sent, b_sent, mask=m, cache_modifier=".wt")
    if TWO_SHOT:
        for i_row in range(i_program, num_rows, num_programs):
            first = tl.cast(i_row, tl.int64) * WORDS
            m_chunk = (o_chunk < WORDS) & (o_chunk < RANK * CHUNK + CHUNK)
            m_chunk = m_chunk & (first + o_chunk < total_words)
            b_low = tl.zeros([CHUNK_BLOCK], tl.float32)
            b_high = tl.zeros([CHUNK_BLOCK], tl.float32)
            for r in tl.static_range(RANKS):
                b_words = _received(
                    mine + r * CAPACITY + first + o_chunk, m_chunk, number, POLLS, TRAP
                )
                n_low, n_high = _values(b_words, KIND)
                b_low += n_low
                b_high += n_high
            b_words = _words(b_low, b_high, KIND)
            b_sent = (b_words.to(tl.int64) & 0xFFFFFFFF) | (number << 32)
            for r in tl.static_range(RANKS):
                p_peer = tl.load(peers + r).to(tl.pointer_type(tl.int64)) + place
                p_sent = p_peer + RANKS * CAPACITY + first + o_chunk
                tl.store(p_sent, b_sent, mask=m_chunk, cache_modifier=".wt")
    for i_row in range(i_program, num_rows, num_programs):
        first = tl.cast(i_row, tl.int64) * WORDS
        m = (o < WORDS) & (first + o < total_words)
        if TWO_SHOT:
            b_words = _received(mine + RANKS * CAPACITY + first + o, m, number, POLLS, TRAP)
        else:
            b_low = tl.zeros([BLOCK], tl.float32)
            b_high = tl.zeros([BLOCK], tl.float32)
            for r in tl.static_range(RANKS):
                if r == RANK:
                    b_words = tl.load(x + first + o, mask=m, other=0)
                else:
                    b_words = _received(mine + r * CAPACITY + first + o, m, number, POLLS, TRAP)
                n_low, n_high = _values(b_words, KIND)
                b_low += n_low
                b_high += n_high
            b_words = _words(b_low, b_high, KIND)
        if NORM:
            b_low, b_high = _values(b_words, KIND)
            r_low, r_high = _values(tl.load(residual + first + o, mask=m, other=0), KIND)
            b_words = _words(b_low + r_low, b_high + r_high, KIND)
            tl.store(residual + first + o, b_words, mask=m)
            b_low, b_high = _values(b_words, KIND)
            PER_WORD: tl.constexpr = 1 if KIND == "fp32" else 2
            b_squares = tl.where(m, b_low * b_low + b_high * b_high, 0.0)
            b_scale = tl.rsqrt(tl.sum(b_squares, axis=0) / (WORDS * PER_WORD) + eps)
            b_low = b_low * b_scale * tl.load(weight + PER_WORD * o, mask=m, other=0.0)
            if PER_WORD == 2:
                b_high = b_high * b_scale * tl.load(weight + 2 * o + 1, mask=m, other=0.0)
            b_words = _words(b_low, b_high, KIND)
        tl.store(y + first + o, b_words, mask=m)
    tl.debug_barrier()
    if tl.atomic_add(calls + 1, 1, sem="acq_rel") == num_programs - 1:
        tl.store(calls + 1, 0)
        tl.store(calls, call)


class PeerSums:
    """The sums of one axis. `addresses`: where this rank sees each rank's memory of
    `memory_bytes(...)`, zeroed.

    Every rank makes the same calls in the same order, on one stream.
    """

    def __init__(
        self,
        addresses: tuple[int, ...],
        *,
        rank: int,
        device: torch.device,
        most_bytes: int,
        polls: int = MOST_POLLS,
    ) -> None:
        self._rank, self._ranks = rank, len(addresses)
        self._capacity = most_bytes // 4
        self._polls = polls
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(2, dtype=torch.int32, device=device)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the kernel can sum this message."""
        size = x.numel() * x.element_size()
        whole = x.is_contiguous() and size % 4 == 0
        return x.dtype in KINDS and whole and 0 < size <= 4 * self._capacity

    def all_reduce(self, x: torch.Tensor, *, two_shot: bool) -> torch.Tensor:
        """The sum over the ranks, in place."""
        words = x.view(-1).view(torch.int32)
        self._launch(words, words, None, words, ROW_WORDS, x.dtype, two_shot=two_shot)
        return x

    def add_norm(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weight_E: torch.Tensor,
        *,
        eps: float,
        two_shot: bool,
    ) -> torch.Tensor:
        """Adds the sum of x over the ranks into the residual and returns the norm of that
        (kernels/rms_norm)."""
        assert residual_TE.is_contiguous() and residual_TE.shape == x_TE.shape
        y_TE = torch.empty_like(x_TE)
        words = [t.view(torch.int32) for t in (x_TE, residual_TE, y_TE)]
        self._launch(
            words[0], words[1], weight_E, words[2], words[0].shape[1], x_TE.dtype, eps=eps,
            two_shot=two_shot,
        )  # fmt: skip
        return y_TE

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        y: torch.Tensor,
        width: int,
        dtype: torch.dtype,
        *,
        eps: float = 0.0,
        two_shot: bool,
    ) -> None:
        chunk = -(-width // (4 * self._ranks)) * 4
        sum_kernel[(min(MOST_PROGRAMS, triton.cdiv(x.numel(), width)),)](
            x, residual, weight, y, self._peers, self._calls, x.numel(), eps, RANK=self._rank,
            RANKS=self._ranks, WORDS=width, BLOCK=power_of_two(width), CHUNK=chunk,
            CHUNK_BLOCK=power_of_two(chunk), CAPACITY=self._capacity, KIND=KINDS[dtype],
            TWO_SHOT=two_shot, NORM=weight is not None, POLLS=self._polls, TRAP=not interpreted(),
            num_warps=8 if width >= 2048 else 4, **launch(x.device),
        )  # fmt: skip


def memory_bytes(ranks: int, most_bytes: int) -> int:
    """Memory each rank must give for messages of up to `most_bytes` (a multiple of 4)."""
    assert most_bytes % 4 == 0, most_bytes
    return 2 * (ranks + 1) * (most_bytes // 4) * 8


def refusal(dtype: torch.dtype) -> str | None:
    """Why these kernels cannot serve, if so."""
    return None if dtype in DTYPES else f"sums no {dtype}"
