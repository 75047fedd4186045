"""Heads in a chain of small perceptrons (IBM's accelerators; Wertheimer et al. 2024, "Accelerating
Production LLMs with Combined Token/Embedding Speculators"). Head i makes its state of the one
before, which is the model's last hidden state for i = 0, and of the newest token:

    s_i = gelu(w_i * rms(P_i s_(i-1) + a * emb_i(token)) + b_i),    logits_i = W_i s_i

with a = sqrt((1 - c^2) * D / 2) / c and c = 0.5^(0.5 / heads). No caches: the first state of a row
is made where its hidden state is seen, and kept.

R rows, T query tokens, E hidden size of the model, D of the states.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import LAST, Batch
from headrace.back.kernels.activation.op import OP as ACTIVATION
from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.kernels.norm_columns.op import OP as NORM_COLUMNS
from headrace.back.kernels.norm_columns.op import NormColumns, NormColumnsProblem
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.load import LoadReport
from headrace.back.speculative.drafter_place import (
    DrafterPlace,
    check_width,
    load_part_of,
    names_of,
    refused,
)
from headrace.back.speculative.network import DraftNetwork

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class ChainSpec:
    """`heads`: that draft, of `trained` there are. `width`: E, `state`: D. `tied`: all heads have
    the first one's tensors, but for the projections, of which the first two are there. `scaled`:
    what the first one reads is normed."""

    width: int
    state: int
    vocabulary: int
    heads: int
    trained: int
    tied: bool
    scaled: bool

    @property
    def token_factor(self) -> float:
        """a, of the embeddings."""
        state = 0.5 ** (0.5 / self.trained)
        return math.sqrt((1 - state**2) * self.state / 2) / state


class ChainHead:
    """s_(i-1) [N, D], token [N] -> s_i [N, D], and what follows the token."""

    def __init__(self, scope: Scope, spec: ChainSpec, number: int) -> None:
        self._scope, self._width = scope, spec.state
        own = "0" if spec.tied else str(number)
        place = str(min(number, 1)) if spec.tied else str(number)
        inputs = spec.width if number == 0 else spec.state
        self._project = WholeLinear(scope / "proj" / place, inputs, spec.state)
        self._embedding = TokenEmbedding(
            scope / "emb" / own, spec.vocabulary, spec.state, scale=spec.token_factor
        )
        norm = scope / "ln" / own
        self._weight = norm.param("weight", (spec.state,), init="ones")
        self._bias = norm.param("bias", (spec.state,), init="zeros")
        self._head = LogitsHead(scope / "head" / own, spec.vocabulary, spec.state)
        self._bias_D = torch.empty(0)
        self._norm: NormColumns = not_loaded
        self._add: NormColumns = not_loaded
        self._activate: Activation = not_loaded
        self.top: TopOf = not_loaded
        self.logits = self._head.logits
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        scope, new = self._scope, {"device": self._scope.kind, "dtype": self._scope.dtype}
        plain = NormColumnsProblem(**new, width=self._width, eps=None)
        normed = NormColumnsProblem(**new, width=self._width, eps=EPS)
        self._norm = scope.bind(NORM_COLUMNS, normed, self._weight.take().float())
        self._add = scope.bind(NORM_COLUMNS, plain, None)
        self._bias_D = self._bias.take().to(scope.dtype)
        self._activate = scope.bind(ACTIVATION, ActivationProblem(**new, activation="gelu"))
        self.top = self._head.argmax or self._from_logits()

    def _from_logits(self) -> TopOf:
        greedy = self._scope.bind(GREEDY, GreedyProblem(device=self._scope.kind))
        return lambda state_ND: greedy(self._head.logits(state_ND))

    def state(self, before_NX: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        """s_i."""
        sum_ND = self._project.project(before_NX)
        state_ND = sum_ND.new_empty(sum_ND.shape)
        self._norm(sum_ND, state_ND, 0, self._embedding.lookup(token_N))
        self._add(state_ND, state_ND, 0, self._bias_D.expand_as(state_ND))
        return self._activate(state_ND)


class MlpSpeculator:
    """A `DraftNetwork` (network.py). What is kept of a row is s_0."""

    shift = 1
    block = None
    chained = True
    taps = (LAST,)
    kv_forms: tuple[CacheForm, ...] = ()
    offset_D = None

    def __init__(self, scope: Scope, spec: ChainSpec) -> None:
        self._scope, self._spec = scope, spec
        self.width, self.kept, self.dtype = spec.width, spec.state, scope.dtype
        self._heads = [ChainHead(scope, spec, number) for number in range(spec.heads)]
        self._scale: NormColumns = not_loaded
        if spec.scaled:
            scope.on_finish(self._finish)

    def _finish(self) -> None:
        scope, width = self._scope, self._spec.width
        problem = NormColumnsProblem(device=scope.kind, dtype=scope.dtype, width=width, eps=EPS)
        half_E = torch.full((width,), 0.5**0.5, device=scope.device)
        self._scale = scope.bind(NORM_COLUMNS, problem, half_E)

    def follow(
        self, token_T: torch.Tensor, seen_TX: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """See DraftNetwork: the first states, of prompts those of the last tokens."""
        assert seen_TX is not None
        if batch.last_token_batch is not None:
            token_T = token_T.index_select(0, batch.logits_at_N)
            seen_TX = seen_TX.index_select(0, batch.logits_at_N)
        if self._spec.scaled:
            scaled_TX = seen_TX.new_empty(seen_TX.shape)
            self._scale(seen_TX, scaled_TX, 0)
            seen_TX = scaled_TX
        return self._heads[0].state(seen_TX, token_T)

    def draft(
        self, token_R: torch.Tensor, hidden_RE: torch.Tensor | None, batch: Batch, number: int
    ) -> torch.Tensor:
        """See DraftNetwork."""
        assert hidden_RE is not None
        return self._heads[number].state(hidden_RE, token_R)

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._heads[draft].top(hidden_RE)[0]

    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._heads[draft].logits(hidden_RE)


def load_mlp_speculator(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    """The heads of a checkpoint, by the names that fms-extras writes (`speculator.proj.0`), with
    that prefix or without it. Heads that no draft needs are left out."""
    config, names = place.spec.config, names_of(place.spec)
    heads = int(config.get("n_predict") or 3)
    width, vocabulary = int(config.get("emb_dim") or 0), int(config.get("vocab_size") or 0)
    check_width(width, vocabulary, place.target)
    if place.num_drafts > heads:
        raise refused(
            f"num_speculative_tokens is {place.num_drafts}, {place.spec.path} has {heads} heads"
        )
    spec = ChainSpec(
        width=width,
        state=int(config.get("inner_dim") or 0) or width,
        vocabulary=vocabulary,
        heads=place.num_drafts,
        trained=heads,
        tied=bool(config.get("tie_weights", False)),
        scaled=bool(config.get("scale_input", False)),
    )
    return load_part_of(
        place,
        lambda scope: MlpSpeculator(scope, spec),
        _unused(spec, names),
        renamed=((r"^speculator\.", ""),),
    )


def _unused(spec: ChainSpec, names: Collection[str] | None) -> tuple[str, ...]:
    """Tensors of further heads, and those that tied heads have once more."""
    kinds = "emb|head|ln" if spec.tied else "emb|head|ln|proj"
    first = 1 if spec.tied else spec.heads
    others = "|".join(str(number) for number in range(first, spec.trained)) or "none"
    projections = "|".join(str(number) for number in range(2, spec.trained)) or "none"
    tied = (rf"proj\.({projections})\..*",) if spec.tied else ()
    return (rf"({kinds})\.({others})\..*", *tied)
