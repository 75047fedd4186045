"""The Q-former of BLIP-2, and of Granite Speech window by window: learned queries read each window
of positions, or a whole image, through layers of BERT's with cross-attention (Li et al. 2023,
BLIP-2).

W windows of S positions of width I, Q queries, N = W Q, H heads, E width, F of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class QueryWindowsSpec:
    """inputs: width of a position. every: how manieth layer reads the window. outputs: of the
    decoder. names: of the queries and of the last layer."""

    inputs: int
    width: int
    inner: int
    heads: int
    layers: int
    every: int
    eps: float
    queries: int
    outputs: int
    names: tuple[str, str] = ("query", "linear")


class QueryWindows:
    """window_WSI -> y_NF."""

    def __init__(self, scope: Scope, spec: QueryWindowsSpec) -> None:
        inside = scope / "qformer"
        self._queries = scope.param(spec.names[0], (1, spec.queries, spec.width))
        self._norm = LAYER.build(inside / "layernorm", spec.width, eps=spec.eps)
        self._layers = [
            QueryLayer(inside / "encoder.layer" / str(i), spec, reads=i % spec.every == 0)
            for i in range(spec.layers)
        ]
        self._out = WholeLinear(scope / spec.names[1], spec.width, spec.outputs, bias=True)
        self._query_QE = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._query_QE = self._norm.norm(self._queries.take()[0])

    def forward(self, window_WSI: torch.Tensor) -> torch.Tensor:
        """See the class."""
        windows = window_WSI.shape[0]
        x_NE, seen_MI = self._query_QE.repeat(windows, 1), window_WSI.flatten(0, 1)
        for layer in self._layers:
            x_NE = layer.forward(x_NE, seen_MI, windows)
        return self._out.project(x_NE)


class QueryLayer:
    """x_NE -> x_NE: the queries see each other, then the window if it `reads`, then an MLP, a norm
    behind each."""

    def __init__(self, scope: Scope, spec: QueryWindowsSpec, *, reads: bool) -> None:
        self._own = QueryAttention(scope / "attention", spec, spec.width)
        self._reads = None
        if reads:
            self._reads = QueryAttention(scope / "crossattention", spec, spec.inputs)
        up, down = scope / "intermediate_query.dense", scope / "output_query"
        self._up = WholeLinear(up, spec.width, spec.inner, bias=True)
        self._down = WholeLinear(down / "dense", spec.inner, spec.width, bias=True)
        self._norm = LAYER.build(down / "LayerNorm", spec.width, eps=spec.eps)

    def forward(self, x_NE: torch.Tensor, seen_MI: torch.Tensor, windows: int) -> torch.Tensor:
        """`seen_MI`: positions of all windows."""
        x_NE = self._own.forward(x_NE, x_NE, windows)
        if self._reads is not None:
            x_NE = self._reads.forward(x_NE, seen_MI, windows)
        return self._norm.norm(x_NE + self._down.project(F.gelu(self._up.project(x_NE))))


class QueryAttention:
    """x_NE over seen_MI -> x_NE, normed, within windows."""

    def __init__(self, scope: Scope, spec: QueryWindowsSpec, seen: int) -> None:
        inside, out = scope / "attention", scope / "output"
        self._heads = spec.heads
        self._query = WholeLinear(inside / "query", spec.width, spec.width, bias=True)
        self._key, self._value = (
            WholeLinear(inside / name, seen, spec.width, bias=True) for name in ("key", "value")
        )
        self._out = WholeLinear(out / "dense", spec.width, spec.width, bias=True)
        self._norm = LAYER.build(out / "LayerNorm", spec.width, eps=spec.eps)

    def forward(self, x_NE: torch.Tensor, seen_MI: torch.Tensor, windows: int) -> torch.Tensor:
        """See the class."""
        q, k, v = (
            one.unflatten(0, (windows, -1)).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for one in (
                self._query.project(x_NE),
                self._key.project(seen_MI),
                self._value.project(seen_MI),
            )
        )
        y_WHQD = F.scaled_dot_product_attention(q, k, v)
        y_NE = y_WHQD.transpose(1, 2).flatten(2).flatten(0, 1)
        return self._norm.norm(x_NE + self._out.project(y_NE))
