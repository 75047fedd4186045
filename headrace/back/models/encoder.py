"""The encoders that embed, score and classify text: bidirectional attention inside each text, no KV
cache.

A family file reads its config and states its layers; the forward pass is here once. Two kinds of
layer: norms after each branch (BERT, Devlin et al. 2018) and before it (ModernBERT, Warner et al.
2024). T tokens, E hidden size, H query heads, K KV heads, D head_dim, N pooled vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.span_attention.op import OP as SPAN_ATTENTION
from headrace.back.kernels.span_attention.op import SpanAttentionProblem
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.attention import HeadNorm, QKNorm
from headrace.back.layers.linear import ColumnLinear, RowLinear, total
from headrace.back.layers.mlp import FeedForward, FeedForwardPlace
from headrace.back.layers.norm import RMS_NO_WEIGHT, BlockNorm, LayerNorm
from headrace.back.layers.position_bias import BandBias, CausalBias, RelativeBias, SlopeBias
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

OLD_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""What the first checkpoints, BERT's among them, call a norm's tensors."""
Embed = Callable[[Batch], torch.Tensor]
Behind = Callable[[torch.Tensor, Batch], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """The sizes every encoder states under the same keys."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str

    @property
    def feed_forward(self) -> FeedForwardPlace:
        """What every layer's MLP is built with."""
        return FeedForwardPlace(width=self.width, inner=self.inner, activation=self.activation)


class SpanAttentionLayer:
    """x_TE -> y_TE: projects, rotates if there is a rope, attends inside each text, projects back.

    `names` are the checkpoint's query, key and value, or the one tensor that holds all three, one
    after the other or, `by_head`, each head's beside each other; `out` leads back, with a bias as
    the others have it unless `out_bias` says. `window`: tokens seen on each side, None: all.
    `scale`: of the scores, None: 1/sqrt(head_dim). `softcap`: of them. `position_bias`: added to
    them. `value_eps`: of a norm without weight over each value, None: there is none. `wide_norms`:
    layer norms of all queries of a token, and of all keys. `spans`: what attends, None: SpanHeads.
    """

    def __init__(
        self,
        scope: Scope,
        sizes: EncoderSizes,
        *,
        names: tuple[str, ...],
        out: str,
        by_head: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        rope: RopeSpec | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm: QKNorm | None = None,
        value_eps: float | None = None,
        position_bias: RelativeBias | CausalBias | SlopeBias | BandBias | None = None,
        wide_norms: tuple[LayerNorm, LayerNorm] | None = None,
        spans: SpanAttends | None = None,
    ) -> None:
        merged = names[0] if len(names) == 1 else None
        if wide_norms is not None and scope.mesh.tp.size > 1:
            raise ConfigError(
                f"--tensor-parallel {scope.mesh.tp.size}: norms of all queries of a token need all "
                "heads on one device; leave it out",
                field="tensor_parallel",
            )
        self._wide_norms = wide_norms
        labels = names if merged is None else ("query", "key", "value")
        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        parts = tuple(
            Part(label, count * sizes.head_dim, count)
            for label, count in zip(labels, counts, strict=True)
        )
        self._split = [local_units(part, scope.mesh.tp) for part in parts]
        self._head_dim = sizes.head_dim
        groups = sizes.kv_heads if by_head else 1
        self._qkv = ColumnLinear(scope, sizes.width, parts, bias=bias, merged=merged, groups=groups)
        out_bias = bias if out_bias is None else out_bias
        self._out = RowLinear(scope / out, parts[0], sizes.width, bias=out_bias)
        self._qk_norms: list[HeadNorm] = []
        if qk_norm is not None:
            assert qk_norm.over == "head" and not qk_norm.after_rope, qk_norm
            named = zip(qk_norm.names, parts[:2], strict=True)
            self._qk_norms = [qk_norm.build(scope / name, part) for name, part in named]
        self._value_norm = None
        if value_eps is not None:
            self._value_norm = RMS_NO_WEIGHT.build(scope, sizes.head_dim, eps=value_eps)
        self._rope = Rope(scope, rope) if rope else None
        self._spans: SpanAttends = spans or SpanHeads(
            scope,
            self._split[0],
            self._split[1],
            sizes.head_dim,
            scale=scale,
            window=window,
            softcap=softcap,
            position_bias=position_bias,
        )

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        qkv = self._qkv.project(x_TE).view(x_TE.shape[0], sum(self._split), self._head_dim)
        q_THD, k_TKD, v_TKD = qkv.split_with_sizes(self._split, dim=1)
        if self._qk_norms:
            of_q, of_k = self._qk_norms
            q_THD, k_TKD = of_q.norm(q_THD), of_k.norm(k_TKD)
        if self._wide_norms is not None:
            of_q, of_k = self._wide_norms
            q_THD = of_q.norm(q_THD.flatten(1)).view(q_THD.shape)
            k_TKD = of_k.norm(k_TKD.flatten(1)).view(k_TKD.shape)
        if self._value_norm is not None:
            v_TKD = self._value_norm.norm(v_TKD)
        if self._rope is not None:
            self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        y_THD = self._spans.attend(q_THD, k_TKD, v_TKD, batch)
        return self._out.project(y_THD.reshape(x_TE.shape[0], -1))


class SpanAttends(Protocol):
    """Attention inside texts."""

    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """y_THD."""
        ...


class SpanHeads:
    """(q_THD, k_TKD, v_TKD) -> y_THD inside each text, by `heads` and `kv_heads` of this rank.
    `scale`, `window`, `softcap`, `position_bias`: see SpanAttentionLayer."""

    def __init__(
        self,
        scope: Scope,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        position_bias: RelativeBias | CausalBias | SlopeBias | BandBias | None = None,
    ) -> None:
        self._scope, self._position_bias = scope, position_bias
        self._problem = SpanAttentionProblem(
            device=scope.kind,
            dtype=scope.dtype,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
            bias_reach=0 if position_bias is None else position_bias.reach,
        )
        self._attend = not_loaded
        scope.on_finish(self._finish)

    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        return self._attend(q_THD, k_TKD, v_TKD, batch.query_start.tolist())

    def _finish(self) -> None:
        biases = () if self._position_bias is None else (self._position_bias.table,)
        self._attend = self._scope.bind(SPAN_ATTENTION, self._problem, *biases)


class WholeBranch:
    """x_TE -> y_TE of a feed-forward that leaves its sum to others, such as experts."""

    def __init__(self, branch: FeedForward) -> None:
        self._branch = branch

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y_TE = total(self._branch.forward_into(x_TE, x_TE))
        assert y_TE is not None, "a branch that does not add gives its sum"
        return y_TE


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """One layer. `before_*` norms come before their branch, `behind_*` ones after it, `after_*`
    ones after the sum with the residual."""

    attention: TokenLayer
    mlp: TokenBranch
    before_attention: BlockNorm | None = None
    behind_attention: TokenNorm | None = None
    after_attention: BlockNorm | None = None
    before_mlp: BlockNorm | None = None
    behind_mlp: TokenNorm | None = None
    after_mlp: TokenNorm | None = None

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        y_TE = self.attention.forward(_normed(self.before_attention, x_TE), batch)
        x_TE = _normed(self.after_attention, x_TE + _normed(self.behind_attention, y_TE))
        y_TE = self.mlp.forward(_normed(self.before_mlp, x_TE))
        return _normed(self.after_mlp, x_TE + _normed(self.behind_mlp, y_TE))


class TokenLayer(Protocol):
    """What an encoder asks of a layer."""

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x behind it."""
        ...


class TokenBranch(Protocol):
    """What a layer asks of its second branch."""

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """y_TE."""
        ...


class TokenNorm(Protocol):
    """What an encoder asks of what stands behind its layers."""

    def norm(self, x_TE: torch.Tensor, /) -> torch.Tensor:
        """What is pooled."""
        ...


class FrameHead(Protocol):
    """What an encoder asks of a head on pooled vectors."""

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """float32, one row for each."""
        ...


def _normed(norm: TokenNorm | None, x_TE: torch.Tensor) -> torch.Tensor:
    return x_TE if norm is None else norm.norm(x_TE)


class Encoder:
    """An encoder on this rank: `back/models/protocol.py: LoadableModel`, for texts that are pooled.

    `ignored`: checkpoint tensors that pooling does not need (language-model heads, BERT's own
    pooler). `segments`: the embedding wants to know which text of a pair a token belongs to.
    `behind`: what becomes of the hidden states in the end; `renamed`: see WeightPlan.
    """

    kv_forms: tuple[CacheForm, ...] = ()
    generates = False
    attention_heads = 0
    media: MediaEncoder | None = None
    encoder_tokens = 0

    def __init__(
        self,
        scope: Scope,
        sizes: EncoderSizes,
        *,
        embed: Embed,
        layers: Sequence[TokenLayer],
        norm: TokenNorm | None,
        classifier: FrameHead | None,
        ignored: tuple[str, ...],
        segments: bool = False,
        behind: Behind | None = None,
        renamed: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.logits_width = sizes.vocabulary
        self.state = "segments" if segments else "texts"
        self._embed = embed
        self._layers = tuple(layers)
        self._norm = norm
        self._behind = behind
        self._classifier = classifier
        self._ledger = scope.ledger
        self.weights = WeightPlan(
            params=tuple(scope.ledger.params), ignored=ignored, renamed=(*OLD_NAMES, *renamed)
        )
        self.decisions: tuple[Decision, ...] = ()
        self.host_kernels: tuple[str, ...] = ()
        self.host_pairs: int | None = None
        self.adapters: AdapterSlots | None = None

    def finish_load(self) -> None:
        """Packs the loaded weights, layer by layer."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        self.host_kernels = self._ledger.host_kernels()
        self.host_pairs = self._ledger.host_pairs()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E]."""
        x_TE = self._embed(batch)
        for layer in self._layers:
            x_TE = layer.forward(x_TE, batch)
        x_TE = _normed(self._norm, x_TE)
        return x_TE if self._behind is None else self._behind(x_TE, batch)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """An encoder has no language-model head here: nothing may ask."""
        raise AssertionError("an encoder generates no tokens")

    @property
    def argmax(self) -> None:
        """See CausalModel: it has no such kernel."""
        return None

    top_candidates = argmax

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Class logits [N, labels], float32."""
        assert self._classifier is not None, "the model has no classification head"
        return self._classifier.logits(hidden_NE)


def read_encoder_sizes(
    config: ConfigReader,
    *,
    eps: float,
    activation_key: str = "hidden_act",
    eps_key: str = "layer_norm_eps",
    default_activation: str = "gelu",
) -> EncoderSizes:
    """The common sizes, checked against each other."""
    width = config.int("hidden_size", ge=1)
    heads = config.int("num_attention_heads", ge=1)
    kv_heads = config.int("num_key_value_heads", heads, ge=1)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = config.int("head_dim", None, ge=1)
    if head_dim is None and width % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    named = config.choice(activation_key, (*names, "relu", "silu"), default_activation)
    return EncoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int("intermediate_size", ge=1),
        layers=config.int("num_hidden_layers", ge=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or width // heads,
        eps=config.float(eps_key, eps, ge=0.0),
        activation=names.get(named, named),
    )
