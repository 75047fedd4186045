"""Control vectors: a direction for each layer, which is added to the residual behind it for every
token, so that all answers lean to what the direction stands for (Zou et al. 2023, "Representation
Engineering"; files as llama.cpp and repeng write them: tensors `direction.N` of GGUF, float32 [E],
added behind layer N, of which layer 0 has none).

T tokens, E hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.embedding.op import OP as EMBEDDING
from headrace.back.kernels.embedding.op import Embedding, EmbeddingProblem
from headrace.back.kernels.norm_columns.op import OP as NORM_COLUMNS
from headrace.back.kernels.norm_columns.op import NormColumns, NormColumnsProblem
from headrace.back.layers.row_directions import RowDirections
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.decoder_layer import Layer, LayerAround, Stream
from headrace.base.config.gguf import GGUFTensor, read_gguf
from headrace.base.config.residual import ControlSpec
from headrace.base.errors import ConfigError

NAME = re.compile(r"direction\.([1-9]\d{0,5})")


def directions(spec: ControlSpec | None) -> dict[int, torch.Tensor]:
    """By layer, the sum of what the files add behind it, float32 [E]; ConfigError for a file that
    holds something else."""
    return {} if spec is None or not spec.files else _sum_of(spec, spec.files)


def row_directions(spec: ControlSpec | None) -> RowDirections | None:
    """Those that requests may name; None: there are none."""
    if spec is None or not spec.named:
        return None
    vectors = {name: _sum_of(spec, ((path, 1.0),)) for name, path in spec.named}
    return RowDirections(vectors, rows=spec.rows)


def _sum_of(spec: ControlSpec, scaled: tuple[tuple[str, float], ...]) -> dict[int, torch.Tensor]:
    total: dict[int, torch.Tensor] = {}
    for path, scale in scaled:
        for tensor in read_gguf(Path(path)).tensors.values():
            layer, vector_E = _layer(tensor), _vector(tensor) * scale
            if layer > spec.last or layer < spec.first:
                continue
            before_E = total.get(layer)
            if before_E is not None and before_E.shape != vector_E.shape:
                raise _bad(tensor, f"{len(vector_E)} numbers; in another file {len(before_E)}")
            total[layer] = vector_E if before_E is None else before_E + vector_E
    if not total:
        files = ", ".join(path for path, _ in scaled)
        raise ConfigError(
            f"--control-vectors: {files}: no direction of layers {spec.first} to {spec.last}",
            field="control_vectors",
        )
    return total


def _layer(tensor: GGUFTensor) -> int:
    match = NAME.fullmatch(tensor.name)
    if match is None:
        raise _bad(tensor, "tensors of control vectors are direction.N, N from 1 on")
    return int(match[1])


def _vector(tensor: GGUFTensor) -> torch.Tensor:
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise _bad(tensor, f"{tensor.type.name} of shape {tensor.shape}; F32 [E] is wanted")
    numbers_E = np.fromfile(tensor.path, "<f4", tensor.shape[0], offset=tensor.offset)
    if not np.isfinite(numbers_E).all():
        raise _bad(tensor, "it holds numbers that are not finite")
    return torch.from_numpy(numbers_E)


def _bad(tensor: GGUFTensor, what: str) -> ConfigError:
    return ConfigError(
        f"--control-vectors: {tensor.path}: {tensor.name}: {what}", field="control_vectors"
    )


def steered(layers: list[Layer], scope: Scope, numbers: Sequence[int], width: int) -> list[Layer]:
    """The layers, those behind which something is added replaced. `numbers`: of each in the whole
    model; `width`: E. ConfigError for directions of another width, and for layers whose residual is
    not what stands behind them."""
    rows = scope.directions
    if not scope.control and rows is None:
        return layers
    vectors = [scope.control, *(() if rows is None else rows.vectors.values())]
    wrong = {len(vector_E) for one in vectors for vector_E in one.values()} - {width}
    if wrong:
        raise ConfigError(
            f"--control-vectors: directions of {min(wrong)} numbers; the model's hidden size is "
            f"{width}",
            field="control_vectors",
        )
    if any(layer.tail is not None for layer in layers):
        raise ConfigError(
            "--control-vectors: layers of this model change the residual behind both branches; "
            "nothing can be added there",
            field="control_vectors",
        )
    return [
        _steered(layer, scope, number, width) for number, layer in zip(numbers, layers, strict=True)
    ]


def _steered(layer: Layer, scope: Scope, number: int, width: int) -> Layer:
    rows, vector_E = scope.directions, scope.control.get(number)
    if vector_E is not None:
        layer = ControlledLayer(layer, ControlVector(scope, vector_E, width))
    if rows is not None and number in rows.layers:
        new = {"device": scope.device, "dtype": scope.dtype}
        layer = SteeredLayer(layer, RowVectors(scope, rows.table(number, width, **new)))
    return layer


class ControlVector:
    """What is added to each token's residual, in the model's type."""

    def __init__(self, scope: Scope, vector_E: torch.Tensor, width: int) -> None:
        self._scope, self._width = scope, width
        self._vector_E = vector_E.to(device=scope.device, dtype=scope.dtype)
        self._put: NormColumns = not_loaded
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        problem = NormColumnsProblem(
            device=self._scope.kind, dtype=self._scope.dtype, width=self._width, eps=None
        )
        self._put = self._scope.bind(NORM_COLUMNS, problem, None)

    def add_to(self, residual_TE: torch.Tensor) -> None:
        """Adds it, in place."""
        self._put(residual_TE, residual_TE, 0, self._vector_E.expand_as(residual_TE))


class ControlledLayer(LayerAround):
    """A layer with a control vector behind it."""

    def __init__(self, layer: Layer, vector: ControlVector) -> None:
        super().__init__(layer)
        self._vector = vector

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = self._layer.forward(stream, batch, last=last)
        self._vector.add_to(residual_TE)
        return branch_TE, residual_TE


class RowVectors:
    """What is added to each token's residual, by what its batch says: rows of `table_SE`."""

    def __init__(self, scope: Scope, table_SE: torch.Tensor) -> None:
        self._scope, self._table_SE = scope, table_SE
        self._rows: Embedding = not_loaded
        self._put: NormColumns = not_loaded
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        kind, (rows, width) = self._scope.kind, self._table_SE.shape
        new = {"device": kind, "dtype": self._scope.dtype}
        table = EmbeddingProblem(**new, rows=rows, width=width)
        self._rows = self._scope.bind(EMBEDDING, table, self._table_SE)
        self._put = self._scope.bind(
            NORM_COLUMNS, NormColumnsProblem(**new, width=width, eps=None), None
        )

    def add_to(self, residual_TE: torch.Tensor, row_T: torch.Tensor) -> None:
        """Adds them, in place."""
        self._put(residual_TE, residual_TE, 0, self._rows(row_T))


class SteeredLayer(LayerAround):
    """A layer behind which rows add directions of their own."""

    def __init__(self, layer: Layer, vectors: RowVectors) -> None:
        super().__init__(layer)
        self._vectors = vectors

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer. The last layer that writes a cache may leave fewer rows."""
        branch_TE, residual_TE = self._layer.forward(stream, batch, last=last)
        after = batch.last_token_batch
        fewer = after is not None and len(residual_TE) < len(batch.token_ids_T)
        row_T = after.steered_T if fewer and after is not None else batch.steered_T
        if row_T is not None:
            self._vectors.add_to(residual_TE, row_T)
        return branch_TE, residual_TE
