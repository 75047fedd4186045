"""Experts of models that run by transformers' own code, by our kernels.

transformers reaches the experts of a layer through one method of their module, with the tokens, the
experts that the layer's router has chosen and their weights; that method is replaced on each
module whose experts op `experts` covers: gated MLPs in one tensor for gates and ups and one for
downs. Others stay as they are, and a decision says why. X experts, E hidden size, I inner size, T
tokens, K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headrace.back.kernels.experts.op import OP as EXPERTS
from headrace.back.kernels.experts.op import Experts, ExpertsProblem
from headrace.back.layers.scope import Scope
from headrace.base.config.resolved import Decision

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
PROBE = torch.linspace(-3.0, 3.0, 25)
"""Where an activation is told by what it gives."""


class ForeignExperts:
    """All experts of one model. Without `served` they run by transformers' code."""

    def __init__(self, model: nn.Module) -> None:
        self.served = True
        self._layers = [
            _Layer(self, name, module)
            for name, module in model.named_modules()
            if hasattr(module, "is_concatenated") and hasattr(module, "has_gate")
        ]

    def bind(self, scope: Scope) -> tuple[Decision, ...]:
        """Chooses the kernels, once the weights are there."""
        if not self._layers:
            return ()
        refused = [reason for layer in self._layers if (reason := layer.bind(scope))]
        if not refused:
            why = f"{len(self._layers)} layers give their router's choice to op experts"
            return (Decision("model.experts", "auto", "kernel", why),)
        return (Decision("model.experts", "auto", "transformers", refused[0]),)


class _Layer:
    """One module, whose `forward` it takes the place of. How many experts a token has is seen when
    the model is probed."""

    def __init__(self, experts: ForeignExperts, name: str, module: Any) -> None:
        self._experts, self._name, self._module = experts, name, module
        self._plain: Callable[..., torch.Tensor] = module.forward
        self._kernel: Experts | None = None
        self._slots = 0
        module.forward = self.forward

    def forward(
        self, x_TE: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """As transformers calls it."""
        if self._kernel is None or not self._experts.served:
            self._slots = expert_TK.shape[-1]
            return self._plain(x_TE, expert_TK, weight_TK)
        rows_TE = x_TE.reshape(-1, x_TE.shape[-1]).contiguous()
        chosen_TK = expert_TK.to(torch.int32).contiguous()
        y_TE = self._kernel(rows_TE, chosen_TK, weight_TK.float().contiguous())
        return y_TE.view(x_TE.shape)

    def bind(self, scope: Scope) -> str | None:
        """Chooses the kernel; why there is none."""
        module = self._module
        activation = _activation(module)
        if reason := _uncovered(module, activation):
            return f"{self._name}: {reason}"
        up_XIE, down_XEI = module.gate_up_proj.data, module.down_proj.data
        if module.is_transposed:
            up_XIE, down_XEI = (one.transpose(1, 2).contiguous() for one in (up_XIE, down_XEI))
        experts, width, inner = down_XEI.shape
        problem = ExpertsProblem(
            device=scope.kind,
            dtype=scope.dtype,
            experts=experts,
            slots=self._slots,
            width=width,
            inner=inner,
            activation=activation,
            bias=module.has_bias,
        )
        biases = (None, None)
        if module.has_bias:
            biases = module.gate_up_proj_bias.data, module.down_proj_bias.data
        self._kernel = scope.bind(EXPERTS, problem, up_XIE, down_XEI, *biases)
        return None


def _uncovered(module: Any, activation: str) -> str | None:
    """Why op `experts` does not do what a module does."""
    if not module.has_gate:
        return "its experts have no gates"
    if not module.is_concatenated:
        return "gates and ups lie in turn"
    if module.has_post_expert_norm:
        return "a norm stands behind each expert"
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return "its gates are its own"
    if not activation:
        return "its activation is its own"
    if module.gate_up_proj.dim() != 3 or module.down_proj.dim() != 3:
        return "its weights are not one tensor for all experts"
    return None


def _activation(module: Any) -> str:
    """By what the module's own gives; empty: it is none of ours."""
    act = getattr(module, "act_fn", None)
    if act is None:
        return ""
    values = act(PROBE)
    same = (name for name, ours in ACTIVATIONS.items() if torch.allclose(ours(PROBE), values))
    return next(same, "")
