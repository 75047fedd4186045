"""One layer of a decoder: its sizes, what it states of itself (`LayerSpec`), and the pass through
it. T tokens, E hidden size, N tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import LAST, Batch, HiddenTaps
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.gains import SkipTailSpec
from headrace.back.layers.layer_tail import LayerTailSpec, Tail
from headrace.back.layers.linear import Branch, add_norm, sum_branches, total
from headrace.back.layers.mixer import Mixer, MixerSpec
from headrace.back.layers.mlp import GATED_MLP, FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import (
    PRE,
    BlockNorm,
    BlockNormSpec,
    NormPlacement,
    NormSpec,
    RMSNorm,
    ScaledNorm,
)
from headrace.back.layers.scope import Scope
from headrace.back.parallel.collectives import Partial

Stream = tuple[Branch, torch.Tensor]
"""And the residual [T, E]."""


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """The sizes every dense family states under the same keys."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    tied: bool


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer. Its first branch, the mixer, is attention or a recurrent layer. A layer
    may lack one of its branches. `branch_scale`: what each branch is multiplied with behind its
    last norm. `normed_residual`: each branch is added to what the norm before it gives, times
    these, instead of to what goes into that norm. `tail`: what is done to the residual behind
    both. `norms`: the kinds of norms, by name, that are not the decoder's."""

    mixer: MixerSpec | None
    placement: NormPlacement = PRE
    feed_forward: FeedForwardSpec | None = GATED_MLP
    branch_scale: float = 1.0
    normed_residual: tuple[float, float] | None = None
    tail: LayerTailSpec | SkipTailSpec | None = None
    norms: Mapping[str, BlockNormSpec] = field(default_factory=dict)

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> DecoderLayer:
        """See DecoderLayerSpec."""
        return DecoderLayer(scope, cache, self, sizes, norms)


class DecoderLayerSpec(Protocol):
    """A layer as data of its decoder; `build` makes it on this rank."""

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> Layer:
        """`scope` is the layer's. `cache`: the id of its first cache; `norms`: the kind of its
        norms."""
        ...


class Layer(Protocol):
    """What a decoder asks of a layer. `tail`: what is done to the residual behind it, if anything
    is."""

    @property
    def mixer(self) -> Mixer[Any] | None: ...

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]: ...

    @property
    def tail(self) -> Tail | None: ...

    @property
    def takes_adapters(self) -> bool:
        """Whether it tells the slots of adapters where it goes on with fewer rows."""
        ...

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """The stream behind the layer. `last`: no later layer writes a cache; it goes on with
        `batch.last_token_batch`, if there is one."""
        ...


class LayerAround:
    """What a layer has around whose pass something is done; its heirs say what (`forward`)."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    @property
    def mixer(self) -> Mixer[Any] | None:
        """See Layer."""
        return self._layer.mixer

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See Layer."""
        return self._layer.kv_forms

    @property
    def tail(self) -> Tail | None:
        """See Layer."""
        return self._layer.tail

    @property
    def takes_adapters(self) -> bool:
        """See Layer."""
        return self._layer.takes_adapters


class DecoderLayer:
    """Adds its branches to the residual stream. See LayerSpec."""

    takes_adapters = True

    def __init__(
        self, scope: Scope, cache: int, spec: LayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        place = spec.placement

        def norm(name: str | None) -> BlockNorm | None:
            if name is None:
                return None
            kind = spec.norms.get(name, norms)
            return kind.build(scope / name, sizes.width, eps=sizes.eps)

        self.before_attention = norm(place.before_attention)
        plain = spec.branch_scale == 1.0
        self.parallel = place.parallel
        self.normed_residual = spec.normed_residual is not None
        self.mixer = spec.mixer and spec.mixer.build(
            scope,
            cache,
            norm=self._fusible(self.before_attention),
            adds=plain and place.after_attention is None,
        )
        self.after_attention = norm(place.after_attention)
        self.before_mlp = norm(place.before_mlp)
        self.mlp = spec.feed_forward and spec.feed_forward.build(
            scope,
            FeedForwardPlace(
                width=sizes.width,
                inner=sizes.inner,
                activation=sizes.activation,
                norm=self._fusible(self.before_mlp),
                adds=plain and place.after_mlp is None,
            ),
        )
        self.after_mlp = norm(place.after_mlp)
        self.branch_scale = spec.branch_scale
        self.adapters = scope.adapters
        self.tail = spec.tail and spec.tail.build(
            scope, sizes.width, activation=sizes.activation, norms=norms, eps=sizes.eps
        )
        self.residual_norms: list[BlockNorm | ScaledNorm] = []
        if spec.normed_residual is not None:
            for before, factor in zip(
                (self.before_attention, self.before_mlp), spec.normed_residual, strict=True
            ):
                assert before is not None, "the residual is what a norm gives"
                if isinstance(before, RMSNorm):
                    self.residual_norms.append(ScaledNorm(scope, before, factor))
                else:
                    assert factor == 1.0, "layer norms give the residual as it is"
                    self.residual_norms.append(before)

    def _fusible(self, norm: BlockNorm | None) -> RMSNorm | None:
        """The norm, where the GEMM behind it may do it: not where others read what it gives."""
        return None if norm is None or self.parallel or self.normed_residual else norm.fusible

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """Adds the branch of the layer before to the residual, in place, and leaves its own MLP
        branch, to be added by whoever comes next: so each addition is fused with the norm after it,
        or with the GEMM before it."""
        branch_TE, residual_TE = stream
        if self.parallel:
            return self._forward_parallel(branch_TE, residual_TE, batch, last=last)
        if self.mixer is not None:
            norm = None if self.mixer.norms else self.before_attention
            x_TE = add_norm(norm, branch_TE, residual_TE)
            if self.residual_norms:
                residual_TE = self.residual_norms[0].norm(residual_TE)
            handed, residual_TE, batch = handed_on(
                self.mixer, x_TE, residual_TE, batch, self.adapters, last=last
            )
            branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
            branch_TE = self._after(self.after_attention, branch_TE)
        if self.mlp is None:
            return branch_TE, residual_TE
        norm = None if self.mlp.norms else self.before_mlp
        x_TE = add_norm(norm, branch_TE, residual_TE)
        if self.residual_norms:
            residual_TE = self.residual_norms[1].norm(residual_TE)
        return self._after(self.after_mlp, self.mlp.forward_into(x_TE, residual_TE)), residual_TE

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of its mixer."""
        return () if self.mixer is None else self.mixer.kv_forms

    def _forward_parallel(
        self, branch_TE: Branch, residual_TE: torch.Tensor, batch: Batch, *, last: bool
    ) -> Stream:
        """Whatever reads the residual comes before what adds to it."""
        assert self.mixer is not None and self.mlp is not None, "a branch is missing"
        x_TE = add_norm(self.before_attention, branch_TE, residual_TE)
        handed, residual_TE, rest = handed_on(
            self.mixer, x_TE, residual_TE, batch, self.adapters, last=last
        )
        if rest is not batch:
            x_TE = x_TE.index_select(0, batch.logits_at_N)
        if self.before_mlp is not None:
            x_TE = self.before_mlp.norm(residual_TE)
        mlp_TE = self._after(self.after_mlp, self.mlp.forward_into(x_TE, residual_TE))
        branch_TE = self.mixer.attend_into(handed, residual_TE, rest)
        return sum_branches(self._after(self.after_attention, branch_TE), mlp_TE), residual_TE

    def _after(self, norm: BlockNorm | None, branch_TE: Branch) -> Branch:
        if branch_TE is None or isinstance(branch_TE, Partial):  # goes into the residual as it is
            return branch_TE
        if norm is not None:
            branch_TE = norm.norm(branch_TE)
        if self.branch_scale != 1.0:
            branch_TE = branch_TE * self.branch_scale
        return branch_TE


def handed_on(
    mixer: Mixer[Any],
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    batch: Batch,
    adapters: AdapterSlots | None,
    *,
    last: bool,
) -> tuple[Any, torch.Tensor, Batch]:
    """A mixer's queries, and the residual and the batch that its layer goes on with: those of the
    last tokens where no later layer writes a cache."""
    after = batch.last_token_batch if last else None
    at_N = None if after is None else batch.logits_at_N
    handed = mixer.queries(x_TE, batch, at_N)
    if after is None or at_N is None:
        return handed, residual_TE, batch
    if adapters is not None:
        adapters.take(after)
    return handed, residual_TE.index_select(0, at_N), after


def begun(norm: BlockNorm, stream: Stream, *, first: bool) -> Stream:
    """What the first layer gets of embeddings that are normed: with what is added to them or, with
    `first`, before."""
    branch_TE, x_TE = stream
    if first:
        return branch_TE, norm.norm(x_TE)
    return None, add_norm(norm, branch_TE, x_TE)


def at_last_tokens(
    batch: Batch, inputs_LTP: torch.Tensor | None
) -> tuple[Batch, torch.Tensor | None]:
    """What is left of a step for layers that write no cache, and its part of the layers' inputs."""
    after, at_N = batch.last_token_batch, batch.logits_at_N
    if after is None:
        return batch, inputs_LTP
    left = replace(after, positions_T=batch.positions_T.index_select(0, at_N))
    return left, None if inputs_LTP is None else inputs_LTP.index_select(1, at_N)


def tapped(
    taps: HiddenTaps, layers: list[Layer], norm: BlockNorm | None, stream: Stream
) -> torch.Tensor:
    """What goes into the head; it may be seen, and the residual behind the last of `layers`."""
    if len(layers) in taps.layers:
        stream = total(stream[0]), stream[1]
        taps.see(len(layers), stream[1], stream[0])
    hidden_TE = add_norm(norm, *stream)
    if LAST in taps.layers:
        taps.see(LAST, hidden_TE)
    return hidden_TE
