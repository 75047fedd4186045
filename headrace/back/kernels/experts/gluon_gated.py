"""What becomes of gates and ups in the kernels of Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gated(b_gate, b_up, clamp, alpha, CLAMP: gl.constexpr, OAI: gl.constexpr):
    """act(gate) * up: by SiLU, or as gpt-oss has it."""
    if CLAMP:
        b_gate = gl.minimum(b_gate, clamp)
        b_up = gl.minimum(gl.maximum(b_up, -clamp), clamp)
    if OAI:
        return b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + 1.0)
    else:
        return b_gate / (1.0 + gl.exp(-b_gate)) * b_up
