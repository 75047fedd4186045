"""Heads that draft all at once from the model's last hidden state h (Cai et al. 2024, "Medusa").
Head i says the token i + 1 places behind the newest one, by

    logits_i = W_i (h + silu(A_i h + b_i))

with one or several such residual blocks, and with the model's own output head where the checkpoint
has none of its own. No caches: a row needs the hidden state behind its newest token but one.

R rows, T query tokens, E hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.blocks import Decoder
from headrace.back.models.load import LoadReport
from headrace.back.speculative.drafter_place import (
    DrafterPlace,
    check_width,
    load_part_of,
    names_of,
    refused,
)
from headrace.back.speculative.network import DraftNetwork


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """`heads`: as many as there are drafts at most. `blocks` of each, with a `bias` or without.
    `vocabulary`: tokens that its output heads know, None: they are the model's."""

    width: int
    heads: int
    blocks: int
    bias: bool
    vocabulary: int | None


class MedusaHeads:
    """A `DraftNetwork` (network.py) over `target`, which is loaded."""

    shift = 1
    block = None
    chained = False
    taps = (LAST,)
    kv_forms: tuple[CacheForm, ...] = ()
    offset_D = None

    def __init__(self, scope: Scope, spec: MedusaSpec, target: Decoder) -> None:
        self._scope, self._spec, self._target = scope, spec, target
        self.width = self.kept = spec.width
        self.dtype = scope.dtype
        self._blocks = [
            [
                WholeLinear(
                    scope / "blocks" / str(head) / "layers" / str(layer),
                    spec.width,
                    spec.width,
                    bias=spec.bias,
                )
                for layer in range(spec.blocks)
            ]
            for head in range(spec.heads)
        ]
        self._heads = [
            LogitsHead(scope / "lm_heads" / str(head), spec.vocabulary, spec.width)
            for head in range(spec.heads if spec.vocabulary is not None else 0)
        ]
        self._top: list[TopOf] = []
        self._logits: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self._activate: Activation = not_loaded
        self._add: NormColumns = not_loaded
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        scope, new = self._scope, {"device": self._scope.kind, "dtype": self._scope.dtype}
        self._activate = scope.bind(ACTIVATION, ActivationProblem(**new, activation="silu"))
        columns = NormColumnsProblem(**new, width=self.width, eps=None)
        self._add = scope.bind(NORM_COLUMNS, columns, None)
        heads = self._heads or [self._target.head] * self._spec.heads
        self._top = [head.argmax or self._from_logits(head) for head in heads]
        self._logits = [head.logits for head in heads]

    def _from_logits(self, head: LogitsHead) -> TopOf:
        greedy = self._scope.bind(GREEDY, GreedyProblem(device=self._scope.kind))
        return lambda hidden_NE: greedy(head.logits(hidden_NE))

    def follow(
        self, token_T: torch.Tensor, seen_TX: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """See DraftNetwork: there is nothing to compute."""
        assert seen_TX is not None
        return seen_TX

    def draft(
        self, token_R: torch.Tensor, hidden_RE: torch.Tensor | None, batch: Batch, number: int
    ) -> torch.Tensor:
        """Nobody asks for it: heads without caches read no drafts."""
        raise AssertionError("it has no passes")

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._top[draft](self._behind_blocks(hidden_RE, draft))[0]

    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._logits[draft](self._behind_blocks(hidden_RE, draft))

    def _behind_blocks(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        for block in self._blocks[draft]:
            sum_RE = hidden_RE.new_empty(hidden_RE.shape)
            self._add(hidden_RE, sum_RE, 0, self._activate(block.project(hidden_RE)))
            hidden_RE = sum_RE
        return hidden_RE


def load_medusa(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    """The heads of a checkpoint, by vLLM's names (`blocks.0.layers.0`, `lm_heads.0`) or those of
    the method's authors (`0.0.linear`, `0.1`). Heads that no draft needs are left out."""
    config, names = place.spec.config, names_of(place.spec)
    heads = int(config.get("num_heads") or config.get("medusa_num_heads") or 5)
    blocks = int(config.get("num_hidden_layers") or config.get("medusa_num_layers") or 1)
    width = place.target.spec.sizes.width
    check_width(int(config.get("hidden_size") or width), _vocabulary(place), place.target)
    if place.num_drafts > heads:
        raise refused(
            f"num_speculative_tokens is {place.num_drafts}, {place.spec.path} has {heads} heads"
        )
    if config.get("truncated_vocab_size") not in (None, _vocabulary(place)):
        raise refused(f"{place.spec.path}: truncated_vocab_size is not supported")
    biases = bool(config.get("medusa_fc_bias", False))
    if names is not None:
        biases = any(re.search(r"(^|\.)(layers\.\d+|linear)\.bias$", name) for name in names)
    own = names is None or any(
        re.search(r"lm_heads\.0\.weight$|^\d+\.\d+\.weight$", one) for one in names
    )
    own = own and not config.get("original_lm_head")
    spec = MedusaSpec(
        width=width,
        heads=min(heads, place.num_drafts),
        blocks=blocks,
        bias=biases,
        vocabulary=place.target.logits_width if own else None,
    )
    renamed = (
        (r"^medusa_heads?\.", ""),
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    )
    unused = "|".join(str(head) for head in range(spec.heads, heads)) or "none"
    ignored = (rf"(blocks|lm_heads)\.({unused})\..*", *(() if own else (r"lm_heads\..*",)))
    return load_part_of(
        place, lambda scope: MedusaHeads(scope, spec, place.target), ignored, renamed=renamed
    )


def _vocabulary(place: DrafterPlace) -> int:
    return int(place.spec.config.get("vocab_size") or place.target.logits_width)
