"""The decoder that most families share: embedding, layers, norm, head, and the plain keys of
config.json.

A family file reads its own config, states what differs (`LayerSpec` per layer, with a row of the
placements of norms; `DecoderSpec` for the rest) and names its tensors; the forward pass is here
once. T tokens, E hidden size, N tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.classifier import classifier_of
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.logits import LogitsHead, TopOf
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec, GatedMLPSpec
from headrace.back.layers.norm import PRE, RMS, NormPlacement, NormSpec, RMSNorm, ScaledNorm
from headrace.back.layers.residual import BlockNorm, Branch, add_norm, sum_branches
from headrace.back.layers.scope import Scope
from headrace.back.models.weights import WeightPlan, names_within
from headrace.back.parallel.collectives import Partial
from headrace.base.config.hf import REQUIRED, ConfigReader
from headrace.base.config.layer_count import num_layers
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
PLAIN_ACTIVATIONS = {**ACTIVATIONS, "relu2": "relu2", "xielu": "xielu"}
"""Of MLPs without a gate."""
GATED_MLP = GatedMLPSpec()
Stream = tuple[Branch, torch.Tensor]
"""And the residual [T, E]."""
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.rotary_emb\.(cos|sin)_cached")


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
    these, instead of to what goes into that norm."""

    mixer: MixerSpec | None
    placement: NormPlacement = PRE
    feed_forward: FeedForwardSpec | None = GATED_MLP
    branch_scale: float = 1.0
    normed_residual: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """Where a decoder lies in its checkpoint: all but the output head below `prefix`. `positions`:
    the table of learned positions, None: there is none."""

    prefix: str = "model"
    embedding: str = "embed_tokens"
    positions: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A whole decoder. `norm` is the kind of all norms of the residual. `positions`: rows of the
    table of learned positions, if it has a name. `renamed`: see WeightPlan."""

    sizes: DecoderSizes
    layers: tuple[LayerSpec, ...]
    norm: NormSpec = RMS
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    logits_bias: bool = False
    positions: int = 0
    names: DecoderNames = DecoderNames()
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


class DecoderLayer:
    """Adds its branches to the residual stream. See LayerSpec. `cache`: the id of its first
    cache."""

    def __init__(self, scope: Scope, cache: int, spec: LayerSpec, decoder: DecoderSpec) -> None:
        sizes, place = decoder.sizes, spec.placement

        def norm(name: str | None) -> BlockNorm | None:
            if name is None:
                return None
            return decoder.norm.build(scope / name, sizes.width, eps=sizes.eps)

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
        self.residual_norms: list[ScaledNorm] = []
        if spec.normed_residual is not None:
            for before, factor in zip(
                (self.before_attention, self.before_mlp), spec.normed_residual, strict=True
            ):
                assert isinstance(before, RMSNorm), "the residual is what a norm gives"
                self.residual_norms.append(ScaledNorm(scope, before, factor))

    def _fusible(self, norm: BlockNorm | None) -> RMSNorm | None:
        """The norm, where the GEMM behind it may do it: not where others read what it gives."""
        return None if norm is None or self.parallel or self.normed_residual else norm.fusible

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """Adds the branch of the layer before to the residual, in place, and leaves its own MLP
        branch, to be added by whoever comes next: so each addition is fused with the norm after it,
        or with the GEMM before it. The last layer goes on with `batch.last_token_batch`."""
        branch_TE, residual_TE = stream
        if self.parallel:
            return self._forward_parallel(branch_TE, residual_TE, batch, last=last)
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        if self.mixer is not None:
            norm = None if self.mixer.norms else self.before_attention
            x_TE = add_norm(norm, branch_TE, residual_TE)
            if self.residual_norms:
                residual_TE = self.residual_norms[0].norm(residual_TE)
            handed = self.mixer.queries(x_TE, batch, at_N)
            if after is not None and at_N is not None:
                residual_TE, batch = residual_TE.index_select(0, at_N), after
            branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
            branch_TE = self._after(self.after_attention, branch_TE)
        elif at_N is not None:
            residual_TE = add_norm(None, branch_TE, residual_TE)
            branch_TE, residual_TE = None, residual_TE.index_select(0, at_N)
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
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(x_TE, batch, at_N)
        if after is not None and at_N is not None:
            residual_TE, batch = residual_TE.index_select(0, at_N), after
            x_TE = x_TE.index_select(0, at_N)
        if self.before_mlp is not None:
            x_TE = self.before_mlp.norm(residual_TE)
        mlp_TE = self._after(self.after_mlp, self.mlp.forward_into(x_TE, residual_TE))
        branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
        return sum_branches(self._after(self.after_attention, branch_TE), mlp_TE), residual_TE

    def _after(self, norm: BlockNorm | None, branch_TE: Branch) -> Branch:
        if branch_TE is None or isinstance(branch_TE, Partial):  # goes into the residual as it is
            return branch_TE
        if norm is not None:
            branch_TE = norm.norm(branch_TE)
        if self.branch_scale != 1.0:
            branch_TE = branch_TE * self.branch_scale
        return branch_TE


class Decoder:
    """A decoder-only language model on this rank: `back/models/protocol.py: CausalModel`."""

    def __init__(self, scope: Scope, spec: DecoderSpec) -> None:
        names, sizes = spec.names, spec.sizes
        prefix = scope.base_within or names.prefix
        inside = scope if scope.head.bare else scope / prefix
        self.logits_width = sizes.vocabulary
        self.generates = scope.head.kind == "lm"
        self.attention_heads = sizes.heads
        self._ledger = scope.ledger
        self._embedding = TokenEmbedding(
            inside / names.embedding,
            sizes.vocabulary,
            sizes.width,
            scale=spec.embedding_scale,
            tied=sizes.tied and self.generates,
        )
        self._positions = None
        if names.positions is not None:
            table = inside / names.positions
            self._positions = TokenEmbedding(table, spec.positions, sizes.width)
        self._layers: list[DecoderLayer] = []
        self.kv_forms: tuple[CacheForm, ...] = ()
        for index, layer in enumerate(spec.layers):
            at = inside / names.layers / str(index)
            self._layers.append(DecoderLayer(at, len(self.kv_forms), layer, spec))
            self.kv_forms += self._layers[-1].kv_forms
        recurrent = any(form.kind == "state" for form in self.kv_forms)
        self.state = "recurrent" if recurrent else "plain"
        self._norm = spec.norm.build(inside / names.norm, sizes.width, eps=sizes.eps)
        self._head = self._logits_head(scope, spec) if self.generates else None
        self._classifier = classifier_of(scope, sizes.width)
        if not all(layer.mixer and layer.mixer.probed for layer in self._layers):
            self.attention_heads = 0
        tied = (rf"{names.head}\.(weight|bias)",) if sizes.tied or not self.generates else ()
        self.weights = WeightPlan(
            params=tuple(self._ledger.params),
            ignored=(*IGNORED, *names_within(scope.path, (*tied, *spec.ignored))),
            prefix=(scope / prefix).path,
            renamed=spec.renamed,
        )
        self.decisions: tuple[Decision, ...] = ()
        self.host_kernels: tuple[str, ...] = ()
        self.host_pairs: int | None = None

    def _logits_head(self, scope: Scope, spec: DecoderSpec) -> LogitsHead:
        return LogitsHead(
            scope / spec.names.head,
            spec.sizes.vocabulary,
            spec.sizes.width,
            tied=self._embedding if spec.sizes.tied else None,
            bias=spec.logits_bias,
            scale=spec.logits_scale,
            softcap=spec.logits_softcap,
        )

    def finish_load(self) -> None:
        """Packs the loaded weights, layer by layer; the plain ones are dropped on the way."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        self.host_kernels = self._ledger.host_kernels()
        self.host_pairs = self._ledger.host_pairs()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See CausalModel."""
        branch_TE = self._positions.lookup(batch.positions_T) if self._positions else None
        stream: Stream = branch_TE, self._embedding.lookup(batch.token_ids_T)
        for layer in self._layers:
            stream = layer.forward(stream, batch, last=layer is self._layers[-1])
        return add_norm(self._norm, *stream)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width], float32."""
        assert self._head is not None, "the model has no language-model head"
        return self._head.logits(hidden_NE)

    @property
    def argmax(self) -> TopOf | None:
        """See CausalModel."""
        return None if self._head is None else self._head.argmax

    @property
    def top_candidates(self) -> TopOf | None:
        """See CausalModel."""
        return None if self._head is None else self._head.top_candidates

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Class logits [N, labels], float32."""
        assert self._classifier is not None, "the model has no classification head"
        return self._classifier.logits(hidden_NE)


BuildFamily = Callable[[Scope, ConfigReader], Decoder]
EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
"""What a norm's epsilon is called besides `rms_norm_eps`."""
INNER = ("n_inner", "ffn_hidden_size")


def read_sizes(
    config: ConfigReader,
    *,
    activation: tuple[str, ...] = ("hidden_act", "hidden_activation"),
    default_activation: str = "silu",
    gated: bool = True,
    eps: float = 1e-6,
    tied: bool = False,
    kv_heads: int | None = None,
    inner: int | None = None,
) -> DecoderSizes:
    """The common sizes, checked against each other. `eps`, `tied` and `inner` are the family's
    defaults, `kv_heads` those of a family with a key of its own."""
    width = config.int("hidden_size", aliases=("n_embd",), ge=1)
    heads = config.int("num_attention_heads", aliases=("n_head",), ge=1)
    kv_heads = kv_heads or config.int("num_key_value_heads", heads, ge=1)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = config.int("head_dim", None, ge=1)
    if head_dim is None and width % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int(
            "intermediate_size",
            inner or (REQUIRED if gated else 4 * width),
            aliases=INNER,
            ge=1,
        ),
        layers=num_layers(config),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or width // heads,
        eps=config.float("rms_norm_eps", eps, aliases=EPS, ge=0.0),
        activation=read_activation(config, activation, default_activation, gated=gated),
        tied=config.bool("tie_word_embeddings", tied),
    )


def read_activation(
    config: ConfigReader, keys: tuple[str, ...], default: str, *, gated: bool = True
) -> str:
    """The activation, by the first of `keys` that is there."""
    known = ACTIVATIONS if gated else PLAIN_ACTIVATIONS
    return known[config.choice(keys[0], known, default, aliases=keys[1:])]


def read_windows(
    config: ConfigReader, layers: int, *, window: int | None, sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types` if the config lists them, else where `sliding(layer)`
    says so."""
    types = config.list("layer_types", None, of=str)
    if types is None:
        return tuple(window if window and sliding(layer) else None for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if len(types) != layers or not set(types) <= set(known):
        raise config.wrong("layer_types", f"{layers} of {', '.join(known)}")
    if "sliding_attention" in types and not window:
        raise CheckpointError(
            f"{config.where}: layer_types names sliding_attention, but sliding_window is absent",
            field="sliding_window",
        )
    return tuple(window if name == "sliding_attention" else None for name in types)


def plain_attention(sizes: DecoderSizes) -> dict[str, object]:
    """The arguments of AttentionSpec that follow from the sizes; the scale is 1/sqrt(head_dim)."""
    return {
        "width": sizes.width,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
    }
