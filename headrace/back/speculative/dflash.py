"""A block drafter (DFlash, arXiv 2602.06036): one pass over the newest token and masks drafts a
whole block, each place seeing all others.

What it knows of the text are the model's hidden states of several layers: `fc` and a norm make one
of them, of which each of its layers makes keys and values, beside those of the block itself. So its
caches hold, for each position, what the model's hidden state there gives; a step is followed by
writing them, and no layer runs over text. The keys of a block lie where the step that verifies it
is going to be followed.

    context: c_TE = norm(fc([h_TE of each tapped layer])); k, v = K c, V c
    block:   x_QE = embed([newest, mask, ...]); a plain layer, whose attention sees both

T query tokens, Q places of all rows' blocks, E hidden size, X what is seen of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.greedy.op import GreedyProblem
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.linear import Branch, WholeLinear, add_norm
from headrace.back.layers.logits import TopOf
from headrace.back.layers.mlp import GATED_MLP, FeedForwardPlace
from headrace.back.layers.norm import RMS
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.models.blocks import Decoder, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderSizes
from headrace.back.models.load import LoadReport
from headrace.back.speculative.drafter_place import (
    DrafterPlace,
    check_width,
    checked_taps,
    load_part_of,
    reader_of,
    refused,
)
from headrace.back.speculative.network import BlockDrafts, DraftNetwork

SHARED = (r"(embed_tokens|lm_head)\.weight",)
"""Tensors that are the model's over again."""


@dataclass(frozen=True, kw_only=True)
class DFlashSpec:
    """`taps`: in front of which layers hidden states are seen; `mask`: the token of open places."""

    sizes: DecoderSizes
    taps: tuple[int, ...]
    attention: AttentionSpec
    mask: int


class DFlashHead:
    """A `DraftNetwork` (network.py) over `target`, which is loaded."""

    shift = 0
    chained = True
    offset_D = None

    def __init__(self, scope: Scope, spec: DFlashSpec, target: Decoder, block: BlockDrafts) -> None:
        self._scope, self._target = scope, target
        sizes = spec.sizes
        self.width = self.kept = sizes.width
        self.taps, self.dtype = spec.taps, scope.dtype
        self.block = block
        self._fc = WholeLinear(scope / "fc", len(spec.taps) * sizes.width, sizes.width)
        self._context_norm = RMS.build(scope / "hidden_norm", sizes.width, eps=sizes.eps)
        self._layers = [
            DFlashLayer(scope / "layers" / str(index), index, spec) for index in range(sizes.layers)
        ]
        self.kv_forms: tuple[CacheForm, ...] = tuple(
            form for layer in self._layers for form in layer.attention.kv_forms
        )
        self._norm = RMS.build(scope / "norm", sizes.width, eps=sizes.eps)
        self._top: TopOf = not_loaded
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        head = self._target.head
        if head.argmax is not None:
            self._top = head.argmax
            return
        greedy = self._scope.bind(GREEDY, GreedyProblem(device=self._scope.kind))
        self._top = lambda hidden_NE: greedy(head.logits(hidden_NE))

    def follow(
        self, token_T: torch.Tensor, seen_TX: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """See DraftNetwork. What the queries of the context would be is thrown away."""
        assert seen_TX is not None
        context_TE = self._context_norm.norm(self._fc.project(seen_TX))
        for layer in self._layers:
            layer.attention.queries(context_TE, batch)
        return context_TE

    def draft(
        self, token_R: torch.Tensor, hidden_RE: torch.Tensor | None, batch: Batch, number: int
    ) -> torch.Tensor:
        """See DraftNetwork: over all places of a block."""
        branch_QE: Branch = None
        residual_QE = self._target.embed(token_R)
        for layer in self._layers:
            branch_QE = layer.forward(branch_QE, residual_QE, batch)
        return add_norm(self._norm, branch_QE, residual_QE)

    def top(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork: the last norm has been taken."""
        return self._top(hidden_RE)[0]

    def logits(self, hidden_RE: torch.Tensor, draft: int) -> torch.Tensor:
        """See DraftNetwork."""
        return self._target.head.logits(hidden_RE)


class DFlashLayer:
    """A plain layer, whose attention is called by itself for the context."""

    def __init__(self, scope: Scope, cache: int, spec: DFlashSpec) -> None:
        sizes = spec.sizes
        self.attention = spec.attention.build(scope, cache, adds=True)
        self._before_attention = RMS.build(scope / "input_layernorm", sizes.width, eps=sizes.eps)
        self._before_mlp = RMS.build(scope / "post_attention_layernorm", sizes.width, eps=sizes.eps)
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=True
        )
        self._mlp = GATED_MLP.build(scope, place)

    def forward(self, branch_QE: Branch, residual_QE: torch.Tensor, batch: Batch) -> Branch:
        """The branch that is still to be added to the residual."""
        x_QE = add_norm(self._before_attention, branch_QE, residual_QE)
        queries = self.attention.queries(x_QE, batch)
        branch_QE = self.attention.attend_into(queries, residual_QE, batch)
        x_QE = add_norm(self._before_mlp, branch_QE, residual_QE)
        return self._mlp.forward_into(x_QE, residual_QE)


def load_dflash(place: DrafterPlace) -> tuple[DraftNetwork, LoadReport]:
    """The drafter of a checkpoint, by the names of the method's authors."""
    check_block(place, ahead=False)

    def build(scope: Scope) -> DFlashHead:
        spec = dflash_spec(place, scope)
        block = BlockDrafts(mask=spec.mask, whole=True, ahead=False)
        return DFlashHead(scope, spec, place.target, block)

    return load_part_of(place, build, SHARED)


def check_block(place: DrafterPlace, *, ahead: bool) -> None:
    """That the blocks of a checkpoint hold as many drafts as there are to be, and one place less
    where no place is `ahead` of the newest token's."""
    block = place.spec.config.get("block_size")
    if block is None:
        return
    most = int(block) - (0 if ahead else 1)
    if place.num_drafts > most:
        raise refused(
            f"num_speculative_tokens is {place.num_drafts}, {place.spec.path} drafts at most "
            f"{most} tokens (block_size {block})"
        )


def dflash_spec(place: DrafterPlace, scope: Scope) -> DFlashSpec:
    """What the config of a checkpoint says; ConfigError for what does not fit the model."""
    reader, config = reader_of(place.spec), place.spec.config
    sizes = read_sizes(reader)
    check_width(sizes.width, sizes.vocabulary, place.target)
    own = config.get("dflash_config") or {}
    mask = own.get("mask_token_id", config.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < place.target.logits_width:
        raise refused(
            f"{place.spec.path}: mask_token_id is {mask!r}, the model knows no such token"
        )
    kinds = set(reader.raw.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise refused(
            f"{place.spec.path}: layer_types {', '.join(sorted(kinds))}; only full_attention"
        )
    bias = reader.bool("attention_bias", False)
    rope = read_rope(reader, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(eps=sizes.eps),
    )
    taps = checked_taps(place, _taps(place, sizes.layers))
    return DFlashSpec(sizes=sizes, taps=taps, attention=attention, mask=mask)


def _taps(place: DrafterPlace, count: int) -> tuple[int, ...]:
    """In front of which layers. The authors count the layers behind which they read, the
    speculators library those in front of which it does."""
    config = place.spec.config
    if (before := config.get("aux_hidden_state_layer_ids")) is not None:
        return tuple(int(layer) for layer in before)
    stated = (config.get("dflash_config") or config).get("target_layer_ids")
    layers = place.target.spec.sizes.layers
    behind = [int(layer) for layer in stated] if stated else _spread(layers, count)
    return tuple(layer + 1 for layer in behind)


def _spread(layers: int, count: int) -> list[int]:
    """Behind which of a model's layers, where the config leaves it open: as the method's authors
    spread them."""
    if count == 1:
        return [layers // 2]
    first, last = 1, layers - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]
