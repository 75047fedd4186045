"""The state of encoder-decoders: what the encoder of each request that has just started reads.

The encoder runs in the request's first step, ahead of the decoder, whose cross-attention keeps its
keys and values in the blocks of the row's cross caches; later steps need nothing of it. After a
preemption it runs again, unless it reads spectrograms: what it gave for the last of these is kept,
as several requests often ask about one (its language, its text at another temperature, the times of
its words).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.back.attention.plan import Batch, EncoderBatch
from headrace.back.kernels.upload import stacked, to_device
from headrace.back.runner.batch import StepShape
from headrace.back.runner.encoder_graphs import graphs_on
from headrace.back.runner.memory import KVMemory
from headrace.back.runner.states.plain import PlainDecoder
from headrace.base.wire.step import RowStart

MOST_TOKENS = 8192
"""Tokens of one pass of the encoder, unless a single text has more: its activations grow with
them."""


MOST_KEPT = 16
"""Outputs of an encoder of spectrograms, on CPUs: on GPUs it has not been run yet."""


class EncoderInputs(PlainDecoder):
    """The ModelState of encoder-decoders that read tokens: each row's first step is run by itself,
    as an encoder is part of it."""

    def __init__(self, memory: KVMemory, device: torch.device, *, max_rows: int) -> None:
        self.host_until = np.ones(max_rows, np.int64)
        self._device = device
        self._block_tokens = memory.block_tokens
        self._cross = [group.kind == "cross" for group in memory.groups]
        self._waiting: dict[int, np.ndarray] = {}

    def end(self, rows: np.ndarray) -> None:
        """A request that never ran leaves its input."""
        for row in rows.tolist():
            self._waiting.pop(row, None)

    def start(self, start: RowStart) -> None:
        """Keeps the encoder's input until the row's first step."""
        if start.encoder:
            self._waiting[start.row] = self._read(start.encoder)

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch with the inputs of the rows that begin in it."""
        rows = shape.rows.tolist()
        begin = [
            (at, self._waiting.pop(row)) for at, row in enumerate(rows) if row in self._waiting
        ]
        runs = self._runs(begin)
        # Each is made when the model comes to it: the device computes one while the host copies the
        # next.
        passes = (self._encoder_batch(batch, some) for some in runs)
        return replace(batch, encoder=passes)

    def _runs(self, begin: list[tuple[int, np.ndarray]]) -> Iterator[list[tuple[int, np.ndarray]]]:
        """The inputs of each pass of the encoder."""
        return _passes(begin, self._num_outputs)

    def _read(self, encoder: bytes) -> np.ndarray:
        """What a request sends."""
        return np.frombuffer(encoder, "<i4")

    def _num_outputs(self, one: np.ndarray) -> int:
        """Of the encoder, over one input."""
        return one.size

    def _input(self, inputs: list[np.ndarray]) -> dict[str, Any]:
        """The part of an EncoderBatch that the encoder reads."""
        token_S = np.concatenate(inputs).astype(np.int64)
        return {"token_ids_S": to_device(token_S, self._device)}

    def _encoder_batch(self, batch: Batch, inputs: list[tuple[int, np.ndarray]]) -> EncoderBatch:
        sizes = [self._num_outputs(one) for _, one in inputs]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        position_S = np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], sizes)
        at_S = np.repeat(np.array([at for at, _ in inputs], np.int64), sizes)
        return EncoderBatch(
            **self._input([one for _, one in inputs]),
            positions_S=to_device(position_S, self._device),
            query_start=starts,
            slots_GS=tuple(self._slots(batch, at_S, position_S)),
        )

    def _slots(
        self, batch: Batch, at_S: np.ndarray, position_S: np.ndarray
    ) -> Iterator[torch.Tensor]:
        """Where each output's keys and values go in each group; nowhere in those that grow."""
        block_S = position_S // self._block_tokens
        offset_S = to_device(position_S - block_S * self._block_tokens, self._device)
        at = to_device(at_S, self._device), to_device(block_S, self._device)
        for plan, cross in zip(batch.plans, self._cross, strict=True):
            if cross:
                yield plan.block_table_RB[at].long() * self._block_tokens + offset_S
            else:
                yield offset_S[:0]


class Spectrograms(EncoderInputs):
    """The same for encoders of speech, whose inputs are spectrograms of one size: two frames for
    each output."""

    def __init__(self, memory: KVMemory, device: torch.device, *, max_rows: int) -> None:
        super().__init__(memory, device, max_rows=max_rows)
        self._outputs = max(group.span or 0 for group in memory.groups if group.kind == "cross")
        self._graphs = graphs_on(device)
        most = MOST_KEPT if device.type == "cpu" else 0
        self._kept: deque[tuple[np.ndarray, torch.Tensor]] = deque(maxlen=most)
        self.num_encoded = 0

    def forget_content(self) -> None:
        """See ModelState."""
        self._kept.clear()

    def _runs(self, begin: list[tuple[int, np.ndarray]]) -> Iterator[list[tuple[int, np.ndarray]]]:
        """See EncoderInputs. What is known and what is not are passes of their own."""
        known = [self._output_of(one) is not None for _, one in begin]
        for wanted in (True, False):
            some = [each for each, is_known in zip(begin, known, strict=True) if is_known is wanted]
            yield from _passes(some, self._num_outputs)

    def _output_of(self, one: np.ndarray) -> torch.Tensor | None:
        """What the encoder gave for this spectrogram, if it is kept."""
        for kept, output_SE in self._kept:
            if kept is one or np.array_equal(kept, one):
                return output_SE
        return None

    def _outputs_of(
        self,
        inputs: list[np.ndarray],
        key: tuple[Hashable, ...],
        rows: int,
        sounds: torch.Tensor,
        work: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """RecordedRun of these inputs: kept, or by the encoder."""
        kept = [output for one in inputs if (output := self._output_of(one)) is not None]
        if len(kept) == len(inputs):
            return torch.cat(kept)
        run = self._graphs.run if self._graphs is not None else _plainly
        y_SE = run(key, rows, sounds, work)
        self.num_encoded += len(inputs)
        if self._kept.maxlen:
            self._kept += zip(inputs, y_SE.clone().chunk(len(inputs)), strict=True)
        return y_SE

    def _read(self, encoder: bytes) -> np.ndarray:
        """Bands of frames."""
        return np.frombuffer(encoder, "<f4").reshape(-1, 2 * self._outputs)

    def _num_outputs(self, one: np.ndarray) -> int:
        """As many of each."""
        return self._outputs

    def _input(self, inputs: list[np.ndarray]) -> dict[str, Any]:
        """No tokens; the spectrograms one behind the other."""
        none = to_device(np.zeros(0, np.int64), self._device)
        return {
            "token_ids_S": none,
            "spectrograms": stacked(inputs, self._device),
            "recorded": partial(self._outputs_of, inputs),
        }


class Sounds(EncoderInputs):
    """The same for encoders of speech whose inputs have any length; what waits begins with how many
    outputs there will be."""

    def start(self, start: RowStart) -> None:
        """See EncoderInputs."""
        if start.encoder:
            count = np.array([start.cross_tokens], np.float32)
            self._waiting[start.row] = np.concatenate((count, np.frombuffer(start.encoder, "<f4")))

    def _num_outputs(self, one: np.ndarray) -> int:
        """As the core counted them."""
        return int(one[0])

    def _input(self, inputs: list[np.ndarray]) -> dict[str, Any]:
        """No tokens; the sounds."""
        none = to_device(np.zeros(0, np.int64), self._device)
        sounds = tuple(to_device(one[1:].copy(), self._device) for one in inputs)
        return {"token_ids_S": none, "sounds": sounds}


def _plainly(
    key: tuple[Hashable, ...],
    rows: int,
    sounds: torch.Tensor,
    work: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A RecordedRun that records nothing."""
    return work(sounds)


def _passes(
    inputs: Iterable[tuple[int, np.ndarray]], num_outputs: Callable[[np.ndarray], int]
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """The inputs in runs of at most MOST_TOKENS."""
    run: list[tuple[int, np.ndarray]] = []
    num_tokens = 0
    for at, one in inputs:
        size = num_outputs(one)
        if run and num_tokens + size > MOST_TOKENS:
            yield run
            run, num_tokens = [], 0
        run.append((at, one))
        num_tokens += size
    if run:
        yield run
