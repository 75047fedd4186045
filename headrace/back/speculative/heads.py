"""Drafters that are heads of the model: a layer that reads, at each position, the model's hidden
state there and the embedding of the token behind it, and says what comes next. Three kinds:

    eagle3  hidden states of three layers, projected to one by `fc`; attention reads [embedding,
            hidden], each normed; a vocabulary of its own, of which `d2t` leads to the model's
            (Li et al. 2025, "EAGLE-3")
    eagle   the model's last hidden state; `fc` makes one of [embedding, hidden] (Li et al. 2024)
    mtp     the same with a norm over each half, and a layer as the model's own (DeepSeek-AI 2024,
            "DeepSeek-V3", section 2.2)

All share the model's table of tokens; where an image or another medium stands they read what its
encoder gave for the token behind, as the model does. Behind the first draft a head reads what it
gave itself in place of the model's hidden state. T tokens, E hidden size, X what is seen of the
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.norm_columns.op import OP as NORM_COLUMNS
from headrace.back.kernels.norm_columns.op import NormColumns, NormColumnsProblem
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.linear import WholeLinear, add_norm
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import RMS_NO_WEIGHT, NormSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.blocks import Decoder
from headrace.back.models.decoder_layer import DecoderLayerSpec, DecoderSizes, Stream


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head. `taps`: in front of which layers hidden states are seen, or (LAST,). `joint`: names
    within the checkpoint of what makes one of embedding and hidden state: (projection, norm of the
    embedding, norm of the hidden state), the norms None where there is none; None: attention reads
    both (eagle3). `hidden_first`: the projection reads the hidden state before the embedding.
    `layer`: its place; `norm`: of the last norm, None: there is none. `own_head`: the name of its
    own output head, and the tokens it knows; None: it shares the model's."""

    sizes: DecoderSizes
    taps: tuple[int, ...]
    layer: str
    layer_spec: DecoderLayerSpec
    joint: tuple[str, str | None, str | None] | None
    norms: NormSpec
    norm: str | None
    hidden_first: bool = False
    own_head: tuple[str, int] | None = None
    fc_bias: bool = False


class DraftHead:
    """A `DraftNetwork` (network.py) by a head over `target`, which is loaded."""

    shift = 1
    block = None
    chained = True

    def __init__(self, scope: Scope, spec: HeadSpec, target: Decoder) -> None:
        self._scope, self._spec, self._target = scope, spec, target
        self.width = self.kept = width = spec.sizes.width
        self.taps = spec.taps
        self.dtype = scope.dtype
        self._fc: WholeLinear | None = None
        self._join: Joint | None = None
        if spec.joint is None:
            self._fc = WholeLinear(scope / "fc", len(spec.taps) * width, width, bias=spec.fc_bias)
        else:
            self._join = Joint(scope, spec)
        at = scope / spec.layer if spec.layer else scope
        self._layer: Any = spec.layer_spec.build(at, 0, spec.sizes, spec.norms)
        self.kv_forms: tuple[CacheForm, ...] = self._layer.kv_forms
        self._norm = spec.norm and spec.norms.build(scope / spec.norm, width, eps=spec.sizes.eps)
        self._adder = self._norm or RMS_NO_WEIGHT.build(scope, width, eps=spec.sizes.eps)
        self.offset_D: torch.Tensor | None = None
        self._offset = None
        self._head: LogitsHead | None = None
        if spec.own_head is not None:
            self._build_head(*spec.own_head)
        self._top: TopOf = not_loaded
        scope.on_finish(self._finish)

    def _build_head(self, name: str, vocabulary: int) -> None:
        scope, whole = self._scope, self._target.logits_width
        if vocabulary != whole:
            self._offset = scope.param("d2t", (vocabulary,), dtype=torch.int64, init="zeros")
        shared = ChosenRows(self) if not name else None
        self._head = LogitsHead(scope / (name or "lm_head"), vocabulary, self.width, tied=shared)

    def _finish(self) -> None:
        if self._offset is not None:
            self.offset_D = self._offset.take()
        head = self._head or self._target.head
        if head.argmax is not None:
            self._top = head.argmax
            return
        greedy = self._scope.bind(GREEDY, GreedyProblem(device=self._scope.kind))
        self._top = lambda hidden_NE: greedy(head.logits(hidden_NE))

    def follow(
        self, token_T: torch.Tensor, seen_TX: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """See DraftNetwork."""
        assert seen_TX is not None
        hidden_TE = seen_TX if self._fc is None else self._fc.project(seen_TX)
        return self._run(token_T, hidden_TE, batch)

    def draft(
        self, token_R: torch.Tensor, hidden_RE: torch.Tensor | None, batch: Batch, number: int
    ) -> torch.Tensor:
        """See DraftNetwork."""
        assert hidden_RE is not None
        return self._run(token_R, hidden_RE, batch)

    def _run(self, token_T: torch.Tensor, hidden_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the layer gives, before the last norm; of a batch that goes on with the last tokens
        that of these."""
        embedded_TE = self._target.embed(token_T)
        behind = None if batch.encoded_behind is None else batch.encoded_behind()
        if behind is not None:
            embedded_TE = behind.put(embedded_TE)
        if self._join is None:
            stream: Stream = embedded_TE, hidden_TE
        else:
            stream = None, self._join(embedded_TE, hidden_TE)
        branch_TE, residual_TE = self._layer.forward(stream, batch, last=True)
        add_norm(self._adder, branch_TE, residual_TE)  # adds in place, in one kernel everywhere
        return residual_TE

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._top(self._normed(hidden_RE))[0]

    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return (self._head or self._target.head).logits(self._normed(hidden_RE))

    def _normed(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return hidden_RE if self._norm is None else self._norm.norm(hidden_RE)


class ChosenRows:
    """The weight of a head that knows some tokens alone, where the checkpoint leaves it out: their
    rows of the model's table, which is its head too."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head

    @property
    def weight_VE(self) -> torch.Tensor:
        """See HeadWeight."""
        offset = self._head._offset
        assert offset is not None and offset.tensor is not None
        at_D = torch.arange(offset.tensor.shape[0], device=offset.tensor.device) + offset.tensor
        return self._head._target.embed(at_D)


class Joint:
    """(embedding, hidden) -> x_TE. See HeadSpec.joint."""

    def __init__(self, scope: Scope, spec: HeadSpec) -> None:
        assert spec.joint is not None
        name, *norms = spec.joint
        width = spec.sizes.width
        self._pair = NormedPair(
            scope, (norms[0], norms[1]), spec.sizes, spec.norms, hidden_first=spec.hidden_first
        )
        self._project = WholeLinear(scope / name, 2 * width, width, bias=spec.fc_bias)

    def __call__(self, embedded_TE: torch.Tensor, hidden_TE: torch.Tensor) -> torch.Tensor:
        return self._project.project(self._pair(embedded_TE, hidden_TE))


class NormedPair:
    """(embedding, hidden) -> x_T2E, one beside the other, each normed where a norm is named."""

    def __init__(
        self,
        scope: Scope,
        names: tuple[str | None, str | None],
        sizes: DecoderSizes,
        norms: NormSpec,
        *,
        hidden_first: bool = False,
    ) -> None:
        self._scope, self._sizes, self._norms = scope, sizes, norms
        self._hidden_first = hidden_first
        self._weights = [
            name and scope.param(f"{name}.weight", (sizes.width,), init="ones") for name in names
        ]
        self._put: list[NormColumns] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        for weight in self._weights:
            problem = NormColumnsProblem(
                device=self._scope.kind,
                dtype=self._scope.dtype,
                width=self._sizes.width,
                eps=self._sizes.eps if weight else None,
            )
            weight_E = weight.take().float() if weight else None
            if weight_E is not None:
                weight_E += self._norms.offset
            self._put.append(self._scope.bind(NORM_COLUMNS, problem, weight_E))

    def __call__(self, embedded_TE: torch.Tensor, hidden_TE: torch.Tensor) -> torch.Tensor:
        width = self._sizes.width
        x_TX = hidden_TE.new_empty(hidden_TE.shape[0], 2 * width)
        put_embedded, put_hidden = self._put
        put_embedded(embedded_TE, x_TX, width if self._hidden_first else 0)
        put_hidden(hidden_TE, x_TX, 0 if self._hidden_first else width)
        return x_TX


@dataclass(frozen=True, kw_only=True)
class PairLayerSpec:
    """The layer of an eagle3 head: attention over [embedding, hidden], added to the hidden state.
    `halves`, `before_mlp`: the norms of both halves and of the MLP by their names."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    halves: tuple[str, str] = ("input_layernorm", "hidden_norm")
    before_mlp: str = "post_attention_layernorm"

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> PairLayer:
        """See DecoderLayerSpec."""
        return PairLayer(scope, cache, self, sizes, norms)


class PairLayer:
    """See PairLayerSpec. Its stream is (embedding, hidden state)."""

    def __init__(
        self, scope: Scope, cache: int, spec: PairLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._pair = NormedPair(scope, spec.halves, sizes, norms)
        self._attention = spec.attention.build(scope, cache, adds=True)
        self._before_mlp = norms.build(scope / spec.before_mlp, sizes.width, eps=sizes.eps)
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=True
        )
        self._mlp = spec.feed_forward.build(scope, place)
        self.kv_forms = self._attention.kv_forms

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        embedded_TE, residual_TE = stream
        assert isinstance(embedded_TE, torch.Tensor)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        queries = self._attention.queries(self._pair(embedded_TE, residual_TE), batch, at_N)
        if after is not None and at_N is not None:
            residual_TE, batch = residual_TE.index_select(0, at_N), after
        branch_TE = self._attention.attend_into(queries, residual_TE, batch)
        x_TE = add_norm(self._before_mlp, branch_TE, residual_TE)
        return self._mlp.forward_into(x_TE, residual_TE), residual_TE
