"""Hidden states in front of chosen layers, of all tokens of requests, into a file for each: what
drafters are trained with, and whoever else looks into a model.

A file is safetensors: `token_ids` int64 [T] and `hidden_states` [T, L, E], in the model's type, L
layers in the order asked for. It grows with the request's steps, and is whole before the answer is
told: the header has room for any length, the hidden states come first, and once the prompt is there
the token ids are written behind them. Any token of an answer may be its last, so that with answers
each step writes the ids again, behind its states: of 10,000 tokens in 20 us, of 100,000 in 0.9 ms.
The file beside it (`.lock`) is what vLLM's clients wait at; nobody holds it.

A request whose prompt was not computed to its end leaves nothing. What cannot be written costs the
request its file, and no more.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.back.kernels.upload import to_host
from headrace.base.config.residual import HiddenStatesSpec
from headrace.base.wire.request import Captured
from headrace.base.wire.step import RowStart
from headrace.base.wire.transfer import HIDDEN_STATES

log = logging.getLogger(__name__)
HEADER_BYTES = 248
"""Room for the header; with the eight bytes of its length the data is aligned."""
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(eq=False)
class RowFile:
    """The file of one row, of a prompt of `num_prompt` tokens and, with `answers`, of what follows
    it. `tokens`: those whose states are there. `path` None: it is written no more."""

    path: Path | None
    num_prompt: int
    answers: bool
    tokens: array[int] = field(default_factory=lambda: array("q"))

    @property
    def whole(self) -> bool:
        """Whether the states of all of the prompt are there."""
        return len(self.tokens) >= self.num_prompt

    def wanted(self, start: int, count: int) -> int:
        """Of so many tokens from position `start` on those whose states are wanted."""
        return count if self.answers else max(0, min(count, self.num_prompt - start))

    def write(self, start: int, tokens: np.ndarray, states_TLE: torch.Tensor) -> None:
        """The states of the tokens at positions from `start` on, which may have come before."""
        del self.tokens[start:]
        self.tokens.frombytes(tokens.tobytes())
        if self.path is None:
            return
        try:
            self._write(self.path, start, states_TLE.contiguous())
        except OSError as error:
            log.error("hidden states are not written to %s: %s", self.path, error)
            self.remove()

    def _write(self, path: Path, start: int, states_TLE: torch.Tensor) -> None:
        shape, row_bytes = states_TLE.shape[1:], states_TLE[0].numel() * states_TLE.element_size()
        count = len(self.tokens)
        end = count * row_bytes
        header = {
            "hidden_states": {
                "dtype": _TYPES[states_TLE.dtype],
                "shape": [count, *shape],
                "data_offsets": [0, end],
            },
            "token_ids": {
                "dtype": "I64",
                "shape": [count],
                "data_offsets": [end, end + 8 * count],
            },
        }
        flags = os.O_CREAT | os.O_WRONLY
        if start == 0:  # a preempted row's file may have been longer
            flags |= os.O_TRUNC
            os.close(os.open(f"{path}.lock", flags, 0o600))
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(HEADER_BYTES.to_bytes(8, "little"))
            file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
            file.seek(start * row_bytes, os.SEEK_CUR)
            file.write(states_TLE.view(torch.uint8).numpy().tobytes())
            if self.whole:
                file.write(self.tokens)

    def remove(self) -> None:
        """Leaves nothing, now and later."""
        path, self.path = self.path, None
        if path is not None:
            path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class StatesPiece:
    """A row's states of one step on their way to the host, and to its file."""

    index: int
    start: int
    file: RowFile
    token_T: torch.Tensor
    states_TLE: torch.Tensor

    def read(self) -> tuple[int, Captured]:
        """Behind the step's moment: index into the plan's rows, and the path of its file."""
        self.file.write(self.start, self.token_T.numpy(), self.states_TLE)
        path = "" if self.file.path is None else str(self.file.path)
        values = np.frombuffer(path.encode(), np.uint8)
        return self.index, Captured(HIDDEN_STATES, self.start, values)


@dataclass(eq=False)
class LayerStates:
    """`HiddenTaps` of one step that keep what they see, each as a sum of its own."""

    order: tuple[int, ...]
    seen: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> frozenset[int]:
        """See HiddenTaps."""
        return frozenset(self.order)

    def see(
        self, layer: int, hidden_TE: torch.Tensor, branch_TE: torch.Tensor | None = None
    ) -> None:
        """See HiddenTaps."""
        whole_TE = hidden_TE.clone() if branch_TE is None else hidden_TE + branch_TE
        self.seen[layer] = whole_TE

    def stacked(self) -> torch.Tensor:
        """[T, L, E]."""
        return torch.stack([self.seen[layer] for layer in self.order], dim=1)


class HiddenStateFiles:
    """The files of a runner's rows. `rank` 0 writes them; the others do as it does, as all ranks
    must run the same steps."""

    def __init__(self, spec: HiddenStatesSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._files: dict[int, RowFile] = {}
        if rank == 0:
            Path(spec.path).mkdir(parents=True, exist_ok=True, mode=0o700)

    def start(self, start: RowStart) -> bool:
        """A request takes a row; whether its states are wanted."""
        if start.request < 0 or start.pooling is not None:  # a made-up row
            return False
        path = Path(self._spec.path) / f"{start.request:016x}.safetensors"
        self._files[start.row] = RowFile(
            path=None if self._rank else path,
            num_prompt=start.num_prompt,
            answers=HIDDEN_STATES in start.sampling.capture_layers,
        )
        return True

    def end(self, rows: np.ndarray) -> None:
        """Rows were given back; a preempted one comes again, with its prompt's beginning."""
        for row in rows.tolist():
            file = self._files.pop(row, None)
            if file is not None and not file.whole:
                file.remove()

    def taps(self) -> LayerStates:
        """Of one step."""
        return LayerStates(self._spec.layers)

    def piece(
        self, row: int, index: int, start: int, token_T: torch.Tensor, states_TLE: torch.Tensor
    ) -> StatesPiece | None:
        """Of a row whose tokens from position `start` on are these; None once all is there."""
        file = self._files[row]
        count = file.wanted(start, len(token_T))
        if not count:
            return None
        return StatesPiece(
            index=index,
            start=start,
            file=file,
            token_T=to_host(token_T[:count]),
            states_TLE=to_host(states_TLE[:count].contiguous()),
        )
