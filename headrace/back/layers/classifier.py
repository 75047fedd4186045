"""Heads on pooled hidden states: class logits, with what some models put before the last GEMM.

N pooled vectors, E hidden size, L labels. Every rank holds all of a head: it is small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.kernels.gated_act.op import ACTIVATIONS
from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope, not_loaded

HEAD_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **ACTIVATIONS,
    "tanh": torch.tanh,
}


class Dense:
    """x_NE -> y_NO: a GEMM that every rank holds whole."""

    def __init__(self, scope: Scope, inputs: int, outputs: int, *, bias: bool) -> None:
        self.project: Linear = not_loaded
        self._scope = scope
        self._weight = scope.param("weight", (outputs, inputs))
        self._bias = scope.param("bias", (outputs,), init="zeros") if bias else None
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        bias = self._bias.take() if self._bias else None
        self.project = bind_linear(self._scope, self._weight.take(), bias)


class Classifier:
    """hidden_NE -> logits_NL float32: `last(norm(act(first(hidden))))`, where `first` and `norm`
    may be missing."""

    def __init__(
        self,
        last: Dense,
        *,
        first: Dense | None = None,
        activation: str = "tanh",
        norm: LayerNorm | None = None,
    ) -> None:
        self._first = first
        self._activation = HEAD_ACTIVATIONS[activation]
        self._norm = norm
        self._last = last

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self._first is not None:
            hidden_NE = self._activation(self._first.project(hidden_NE))
        if self._norm is not None:
            hidden_NE = self._norm.norm(hidden_NE)
        return self._last.project(hidden_NE).float()


class WordWeights:
    """hidden_NE -> weights_NV float32, log(1 + relu(logit)) of each word of the vocabulary (SPLADE,
    Formal et al. 2021): `table(norm(act(transform(hidden)))) + bias`, where `table` gives the rows
    of the embedding."""

    def __init__(
        self,
        scope: Scope,
        width: int,
        vocabulary: int,
        *,
        table: Callable[[], torch.Tensor],
        activation: str,
        eps: float,
    ) -> None:
        self._transform = Dense(scope / "transform" / "dense", width, width, bias=True)
        self._norm = LayerNorm(scope / "transform" / "LayerNorm", width, eps=eps)
        self._activation, self._table = HEAD_ACTIVATIONS[activation], table
        self._bias = scope.param("bias", (vocabulary,), init="zeros")
        self._bias_V = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._bias_V = self._bias.take()

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_NE = self._norm.norm(self._activation(self._transform.project(hidden_NE)))
        logits_NV = torch.nn.functional.linear(x_NE, self._table(), self._bias_V)
        return torch.log1p(torch.relu(logits_NV.float()))


class ConvolutionHead:
    """hidden_NE -> logits_NL float32, by a matrix that is stored as a convolution of one tap."""

    def __init__(self, scope: Scope, inputs: int, labels: int) -> None:
        self._weight = scope.param("weight", (labels, inputs, 1))
        self._bias = scope.param("bias", (labels,))
        self._weight_LE, self._bias_L = torch.empty(0), torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weight_LE, self._bias_L = self._weight.take()[:, :, 0], self._bias.take()

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.nn.functional.linear(hidden_NE, self._weight_LE, self._bias_L).float()


def classifier_of(scope: Scope, width: int) -> Classifier | None:
    """The head of a decoder that classifies: one GEMM, without bias where it judges whole texts, or
    two of a sequence, each with one."""
    head = scope.head
    if head.kind not in ("sequence", "token"):
        return None
    at = scope / head.name
    if head.deep:
        first = Dense(at / "0", width, width, bias=True)
        last = Dense(at / "2", width, head.num_labels, bias=True)
        return Classifier(last, first=first, activation="relu")
    return Classifier(Dense(at, width, head.num_labels, bias=head.kind == "token"))
