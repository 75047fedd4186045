"""What stands behind both branches of a layer: an input of its own for each token, and a scale of
the residual (Gemma 4).

All layers' inputs come from the token at once: from a table of their own, and from a projection of
the token's embedding. T tokens, E hidden size, L layers, P width of a layer's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.kernels.gated_act.op import OP, GatedAct, GatedActProblem
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope, not_loaded


@dataclass(frozen=True, kw_only=True)
class LayerInputsSpec:
    """`vocabulary`: rows of the table; `covers`: it has one for each token, else those behind the
    last read the first; `width`: P; `scale`: what the table is multiplied with; `media_id`: the
    token whose row of the table is that of images and sounds."""

    vocabulary: int
    width: int
    scale: float
    covers: bool = True
    media_id: int = 0

    def build(
        self, scope: Scope, width: int, layers: int, *, norms: NormSpec, eps: float
    ) -> LayerInputs:
        """`scope` is that of the embedding, whose width is `width`."""
        return LayerInputs(scope, self, width, layers, norms=norms, eps=eps)


class LayerInputs:
    """See the file."""

    def __init__(
        self,
        scope: Scope,
        spec: LayerInputsSpec,
        width: int,
        layers: int,
        *,
        norms: NormSpec,
        eps: float,
    ) -> None:
        joined = layers * spec.width
        self._table = TokenEmbedding(
            scope / "embed_tokens_per_layer", spec.vocabulary, joined, scale=spec.scale
        )
        self._projection = WholeLinear(scope / "per_layer_model_projection", width, joined)
        self._norm = norms.build(scope / "per_layer_projection_norm", spec.width, eps=eps)
        self._layers, self._scale, self._rows = layers, width**-0.5, spec.vocabulary
        self._covers = spec.covers
        self.media_id = spec.media_id

    def of(self, token_ids_T: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """The inputs [L, T, P] of tokens with the embeddings x_TE."""
        projected_TJ = self._projection.project(x_TE) * self._scale
        input_TLP = self._norm.norm(projected_TJ.unflatten(1, (self._layers, -1)))
        if not self._covers:
            token_ids_T = token_ids_T.masked_fill(token_ids_T >= self._rows, 0)
        input_TLP += self._table.lookup(token_ids_T).view(input_TLP.shape)
        return input_TLP.mul_(2**-0.5).transpose(0, 1).contiguous()


class Tail(Protocol):
    """What stands behind a layer's branches."""

    def forward(self, residual_TE: torch.Tensor, input_TP: torch.Tensor | None) -> torch.Tensor:
        """The residual, or the streams [S, T, E] of one, with the layer's own input."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerTailSpec:
    """`width`: P, 0: the layer has no input of its own."""

    width: int

    def build(
        self, scope: Scope, width: int, *, activation: str, norms: NormSpec, eps: float
    ) -> LayerTail:
        """`scope` is the layer's, `width` is E."""
        gate = None
        if self.width:
            gate = InputGate(scope, width, self.width, activation=activation, norms=norms, eps=eps)
        return LayerTail(scope, gate)


class LayerTail:
    """residual_TE -> residual_TE, in place."""

    def __init__(self, scope: Scope, gate: InputGate | None) -> None:
        self._gate = gate
        self._scale = scope.param("layer_scalar", (1,), init="ones")
        self._scale_1 = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, residual_TE: torch.Tensor, input_TP: torch.Tensor | None) -> torch.Tensor:
        """See the class."""
        if self._gate is not None:
            assert input_TP is not None, "the layer has an input of its own"
            residual_TE += self._gate.branch(residual_TE, input_TP)
        return residual_TE.mul_(self._scale_1)

    def _finish(self) -> None:
        self._scale_1 = self._scale.take()


class InputGate:
    """x_TE -> y_TE: the layer's input, times the activation of a projection of x, projected back
    and normed."""

    def __init__(
        self, scope: Scope, width: int, inner: int, *, activation: str, norms: NormSpec, eps: float
    ) -> None:
        self._gate = WholeLinear(scope / "per_layer_input_gate", width, inner)
        self._back = WholeLinear(scope / "per_layer_projection", inner, width)
        self._norm = norms.build(scope / "post_per_layer_input_norm", width, eps=eps)
        self._act: GatedAct = not_loaded
        self._scope = scope
        self._problem = GatedActProblem(
            device=scope.kind, dtype=scope.dtype, width=inner, activation=activation
        )
        scope.on_finish(self._finish)

    def branch(self, x_TE: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        """y_TE, to be added to the residual."""
        gate_TP = self._gate.project(x_TE)
        inner_TP = self._act(torch.cat((gate_TP, input_TP), dim=1))
        return self._norm.norm(self._back.project(inner_TP))

    def _finish(self) -> None:
        self._act = self._scope.bind(OP, self._problem)
