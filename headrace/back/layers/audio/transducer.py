"""Greedy decoding of transducers (Graves 2012), also with durations (Xu et al. 2023, TDT): a
network over the tokens said so far, joined with the frame at hand, says the next token or nothing.
transformers 5.23, generation_parakeet.py.

S frames, E width of the encoder, P width of both parts where they are joined, V tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope

DIGIT = 256
"""Token ids cross in two digits: bfloat16 holds whole numbers to 256."""
NUMBERS = 4
"""Of one emission in a row: both digits of its token and one, its frames, its log-probability."""


@dataclass(frozen=True, kw_only=True)
class AskedSpec:
    """What a model is asked for stands beside each position, as one of `choices`: `choice`, through
    two linear layers with `inner` values between them (the language in Nemotron 3.5)."""

    width: int
    choices: int
    inner: int
    choice: int


class AskedProjector:
    """x_SE -> y_SE."""

    def __init__(self, scope: Scope, spec: AskedSpec) -> None:
        self._spec = spec
        self._up = WholeLinear(scope / "linear_1", spec.width + spec.choices, spec.inner, bias=True)
        self._down = WholeLinear(scope / "linear_2", spec.inner, spec.width, bias=True)

    def project(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        beside_SX = x_SE.new_zeros(x_SE.shape[0], self._spec.choices)
        beside_SX[:, self._spec.choice] = 1.0
        up_SX = self._up.project(torch.cat((x_SE, beside_SX), dim=1))
        return self._down.project(F.relu(up_SX))


@dataclass(frozen=True, kw_only=True)
class TransducerSpec:
    """durations: how many there are, which count from 0; 0: it tells none. most: tokens of one
    frame. start: what stands before the first token. asked: None: there is nothing to ask for."""

    inputs: int
    width: int
    layers: int
    vocabulary: int
    blank: int
    start: int
    most: int
    durations: int
    activation: Callable[[torch.Tensor], torch.Tensor]
    asked: AskedSpec | None = None

    @property
    def row_width(self) -> int:
        """Of what a frame emits."""
        return NUMBERS * self.most


class Transducer:
    """x_SE of one input -> [S, row_width]: what each frame emits, zeros where that is nothing."""

    def __init__(self, scope: Scope, spec: TransducerSpec) -> None:
        self._spec, width = spec, spec.width
        self._into = WholeLinear(scope / "encoder_projector", spec.inputs, width, bias=True)
        decoder = scope / "decoder"
        self._table = decoder.param("embedding.weight", (spec.vocabulary, width))
        self._lstm = [
            {
                f"{kind}_{side}": decoder.param(
                    f"lstm.{kind}_{side}_l{layer}",
                    (4 * width, width) if kind == "weight" else (4 * width,),
                )
                for kind in ("weight", "bias")
                for side in ("ih", "hh")
            }
            for layer in range(spec.layers)
        ]
        self._asked = spec.asked and AskedProjector(scope / "prompt_projector", spec.asked)
        self._projector = WholeLinear(decoder / "decoder_projector", width, width, bias=True)
        outputs = spec.vocabulary + spec.durations
        self._head = WholeLinear(scope / "joint" / "head", width, outputs, bias=True)
        self._table_VP = torch.empty(0)
        self._cells: list[dict[str, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._table_VP = self._table.take()
        self._cells = [{name: param.take() for name, param in cell.items()} for cell in self._lstm]

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        spec = self._spec
        rows = torch.zeros(x_SE.shape[0], spec.most, NUMBERS)
        count = [0] * x_SE.shape[0]
        if self._asked is not None:
            x_SE = self._asked.project(x_SE)
        for frame, token, frames, score in self._emissions(self._into.project(x_SE)):
            high, low = divmod(token + 1, DIGIT)
            rows[frame, count[frame]] = torch.tensor([high, low, frames, score])
            count[frame] += 1
        return rows.flatten(1).to(x_SE.device, x_SE.dtype)

    def _emissions(self, x_SP: torch.Tensor) -> Iterator[tuple[int, int, int, float]]:
        """Frame, token, how many frames it lasts, its log-probability."""
        spec = self._spec
        state = [(x_SP.new_zeros(1, spec.width),) * 2 for _ in range(spec.layers)]
        said_1P, state = self._next(spec.start, state)
        frame = said = 0
        while frame < x_SP.shape[0]:
            y_V = self._head.project(spec.activation(x_SP[frame : frame + 1] + said_1P))[0].float()
            of_token_V = y_V[: spec.vocabulary]
            token = int(of_token_V.argmax())
            blank = token == spec.blank
            step = int(y_V[spec.vocabulary :].argmax()) if spec.durations else int(blank)
            if not blank:
                score = float(of_token_V[token] - of_token_V.logsumexp(0))
                yield frame, token, step if spec.durations else 1, score
                said_1P, state = self._next(token, state)
                said += 1
            if step == 0 and (blank or said >= spec.most):
                step = 1
            if step:
                said = 0
            frame += step

    def _next(
        self, token: int, state: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """What is joined with frames behind this token, and the network's state."""
        x_1P, after = self._table_VP[token : token + 1], []
        for cell, (hidden, memory) in zip(self._cells, state, strict=True):
            gates = F.linear(x_1P, cell["weight_ih"], cell["bias_ih"])
            gates = gates + F.linear(hidden, cell["weight_hh"], cell["bias_hh"])
            into, kept, new, out = gates.chunk(4, dim=1)
            memory = kept.sigmoid() * memory + into.sigmoid() * new.tanh()
            x_1P = out.sigmoid() * memory.tanh()
            after.append((x_1P, memory))
        return self._projector.project(x_1P), after


class EmissionHead:
    """[N, row_width] -> float32 [N, 3 * most]: of each emission its token and one, its frames, its
    log-probability."""

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        high, low, frames, score = hidden_NE.float().unflatten(1, (-1, NUMBERS)).unbind(-1)
        return torch.stack([high * DIGIT + low, frames, score], dim=-1).flatten(1)
