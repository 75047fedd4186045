"""Token embedding, its rows split over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headrace.back.kernels.embedding.op import OP, Embedding, EmbeddingProblem
from headrace.back.kernels.embedding_blocks.op import OP as OP_BLOCKS
from headrace.back.kernels.embedding_blocks.op import EmbeddingBlocksProblem
from headrace.back.kernels.embedding_quant.op import OP as OP_QUANT
from headrace.back.kernels.embedding_quant.op import EmbeddingQuantProblem
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.layers.adapted_table import adapted_table
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import all_reduce
from headrace.back.parallel.param import WeightPiece
from headrace.back.parallel.shard import Part, Shard


class TokenEmbedding:
    """ids_T -> x_TE, scaled by `scale`; `lookup` adds what adapters add, `plain` does not.
    `weight_VE` (local rows) is there after loading, for a tied output head. Only a table that is
    `tied` to a head is quantized here: by itself it costs no reading. `unused`: rows at the
    beginning of the checkpoint's table that no id reaches. `tables`: the tensors that hold it
    one behind the other, by their names and rows; none: one. `beside`: the id whose row is added to
    that of every token, which stands for another stream of tokens in which it alone is said; None:
    there is none. `beside_E` is that row once it is loaded.
    """

    def __init__(
        self,
        scope: Scope,
        vocabulary: int,
        width: int,
        *,
        scale: float = 1.0,
        tied: bool = False,
        unused: int = 0,
        tables: Sequence[tuple[str, int]] = (),
        beside: int | None = None,
    ) -> None:
        self.beside_E: torch.Tensor | None = None
        self._beside = beside
        self.lookup: Embedding = not_loaded
        self.plain: Embedding = not_loaded
        self.weight_VE: torch.Tensor | PackedWeight | BlockWeight | None = None
        self.shard = Shard(axis="tp", dim=0, parts=(vocabulary_part(vocabulary),))
        self._scope = scope
        self._scale = scale
        self._unused = unused
        pieces = tuple(_pieces(scope, width, tables)) if tables else None
        weight = scope.param("weight", (vocabulary, width), pieces=pieces, shard=self.shard)
        self._weight = scope.quantized_table(weight, "tied" if tied else "embedding")
        adaptable = not (unused or tables)
        self._adapted = adapted_table(scope, weight, scale=scale) if adaptable else None
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        axis, weight_VE = self._scope.mesh.tp, self._weight.take()
        if self._unused and axis.size == 1:
            assert isinstance(weight_VE, torch.Tensor), "positions are not quantized"
            weight_VE = weight_VE[self._unused :]
        if self._beside is not None:
            assert isinstance(weight_VE, torch.Tensor), "a table of two streams is not quantized"
            weight_VE = self._with_beside(weight_VE, self._beside)
        local, rows = self._bind(weight_VE)
        scale, self.weight_VE = self._scale, weight_VE
        first = self.shard.spans(axis)[0].start - self._unused

        def whole(ids_T: torch.Tensor) -> torch.Tensor:
            return local(ids_T).mul_(scale)

        def split(ids_T: torch.Tensor) -> torch.Tensor:
            local_T = ids_T - first
            foreign_T = (local_T < 0) | (local_T >= rows)
            x_TE = local(local_T.clamp_(0, rows - 1)).masked_fill_(foreign_T[:, None], 0)
            return all_reduce(x_TE, axis).mul_(scale)

        scaled = scale == 1.0 or isinstance(weight_VE, torch.Tensor)
        self.plain = self.lookup = split if axis.size > 1 else (local if scaled else whole)
        if self._adapted is not None:
            self.lookup = self._adapted.add_to(self.plain, self._scope.bind)

    def _with_beside(self, weight_VE: torch.Tensor, beside: int) -> torch.Tensor:
        """The table with one of its rows added to each; another rank may have that row."""
        axis = self._scope.mesh.tp
        local = beside - self.shard.spans(axis)[0].start
        row_E = torch.zeros_like(weight_VE[0])
        if 0 <= local < weight_VE.shape[0]:
            row_E = weight_VE[local].clone()
        self.beside_E = all_reduce(row_E[None], axis)[0] if axis.size > 1 else row_E
        return weight_VE.add_(self.beside_E)

    def _bind(self, weight_VE: torch.Tensor | PackedWeight | BlockWeight) -> tuple[Embedding, int]:
        """The lookup in this rank's rows, and their number; of floats in all rows it scales."""
        new = {"device": self._scope.kind, "dtype": self._scope.dtype}
        if isinstance(weight_VE, PackedWeight):
            rows, width = weight_VE.outputs, weight_VE.inputs
            packed = EmbeddingQuantProblem(**new, rows=rows, width=width, form=weight_VE.form)
            return self._scope.bind(OP_QUANT, packed, weight_VE), rows
        if isinstance(weight_VE, BlockWeight):
            ((layout, rows),) = weight_VE.kinds
            blocks = EmbeddingBlocksProblem(**new, layout=layout, rows=rows, width=weight_VE.inputs)
            return self._scope.bind(OP_BLOCKS, blocks, weight_VE), rows
        rows, width = weight_VE.shape
        scale = self._scale if self._scope.mesh.tp.size == 1 else 1.0
        problem = EmbeddingProblem(**new, rows=rows, width=width, scale=scale)
        return self._scope.bind(OP, problem, weight_VE), rows


def vocabulary_part(vocabulary: int) -> Part:
    """The split of the vocabulary: as even as it goes."""
    return Part("vocabulary rows", vocabulary, vocabulary, uneven=True)


def _pieces(scope: Scope, width: int, tables: Sequence[tuple[str, int]]) -> Iterator[WeightPiece]:
    """The tensors of a table that lies in several."""
    first = 0
    for name, rows in tables:
        yield WeightPiece(name=scope.name(name), shape=(rows, width), offset=first)
        first += rows
