"""The fallback family: any decoder that transformers knows, run by its own code with our paged
attention inside.

The rows of a step are laid end to end as one sequence [1, T] with their positions; every layer but
attention works token by token, so nothing else needs to know. Attention is reached through
transformers' attention interface. What that cannot cover is refused with a reason: layers without
attention (recurrent state), masks of their own, position biases, several ranks. Whatever slips
through is caught by a check after loading: a chunked, paged run of a few tokens must give the
logits of transformers' own attention. Slower than a family of ours: linear layers are torch's,
norms and rope are unfused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headrace.back.attention.forms import HeadsForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.kv_write.op import OP as KV_WRITE
from headrace.back.kernels.kv_write.op import KVWriteProblem
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.scope import Scope
from headrace.back.models.families import FALLBACK, family_of
from headrace.back.models.foreign_experts import ForeignExperts
from headrace.back.models.foreign_weights import foreign_weights
from headrace.back.models.paged_check import check_paged
from headrace.base.config.hf import ConfigReader
from headrace.base.config.refused import refuse_remote_code
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError, ConfigError
from headrace.base.optional import require

INTERFACE = "headrace"
PROBE_TOKENS = 3
HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings"})
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One attention call as the probe saw it. `value_dim` <= `head_dim`: values are padded to the
    keys' width."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(eq=False)
class _Step:
    """What the attention function finds behind `INTERFACE` while a model of ours runs: the calls
    are numbered as they come, which is the number of their layer."""

    calls: list[_Call] = field(default_factory=list)
    kernels: list[tuple[Callable[..., None], Callable[..., torch.Tensor]]] = field(
        default_factory=list
    )
    batch: Batch | None = None
    next_layer: int = 0


_RUNNING: list[_Step] = []
"""The step inside `_running`, at most one: transformers gives its attention functions no other way
to find it."""


class TransformersModel:
    """`back/models/protocol.py: LoadableModel` around a transformers model."""

    generates = True
    attention_heads = encoder_tokens = 0
    state = "plain"

    def __init__(self, scope: Scope, config: ConfigReader) -> None:
        if scope.mesh.tp.size > 1:
            raise ConfigError(
                f"tensor_parallel {scope.mesh.tp.size} needs a model family of headrace; "
                "the transformers fallback runs on one device",
                field="tensor_parallel",
            )
        refuse_remote_code(config.raw, config.where)
        self._scope = scope
        self._library = require("transformers", extra="hf", purpose="the transformers fallback")
        self._model = _empty_model(self._library, config, scope)
        self._step = _Step()
        self._experts = ForeignExperts(self._model)
        self.weights = foreign_weights(self._model)
        self._replay = _replace_decoder(self._model)
        self._probe(config)
        self.kv_forms = tuple(
            HeadsForm(
                cache=layer,
                kind="window" if call.window else "full",
                span=call.window,
                kv_heads=call.kv_heads,
                head_dim=call.head_dim,
            )
            for layer, call in enumerate(self._step.calls)
        )
        self.logits_width = config.int("vocab_size", ge=1)
        self.decisions: tuple[Decision, ...] = ()
        self.host_kernels: tuple[str, ...] = ()
        self.host_pairs: int | None = None
        self.adapters: AdapterSlots | None = None
        self.media = None

    def finish_load(self) -> None:
        """Chooses the attention kernels and compares a small paged run with transformers' own
        attention."""
        for param in self.weights.params:
            param.take()
        self._step.kernels = [self._bind(call) for call in self._step.calls]
        experts = self._experts.bind(self._scope)
        name = type(self._model).__name__
        with _foreign_code(f"run {name}"):
            error = check_paged(self, self._plain_logits, self._scope)
        limit = TOLERANCES[self._scope.dtype]
        if not error <= limit:
            raise CheckpointError(
                f"{name} cannot run through the transformers fallback: with paged attention its logits differ from "
                f"transformers' own by {error:.2e} of their size (at most {limit:.0e})",
                field="architectures",
            )
        fallback = Decision(
            "model.family",
            "auto",
            "transformers",
            f"{name} has no family of its own; transformers {self._library.__version__} runs it, "
            f"checked to {error:.1e}",
        )
        self.decisions = (fallback, *experts, *self._scope.ledger.decisions())
        self.host_kernels = self._scope.ledger.host_kernels()
        self.host_pairs = self._scope.ledger.host_pairs()

    def forward(self, batch: Batch) -> torch.Tensor:
        """See CausalModel."""
        with self._running(batch):
            out = self._replay.decoder(
                input_ids=batch.token_ids_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
            )
        hidden_TE: torch.Tensor = out.last_hidden_state[0]
        return hidden_TE if batch.last_token_batch is None else hidden_TE[batch.logits_at_N]

    @property
    def argmax(self) -> None:
        """See CausalModel: it has no such kernel."""
        return None

    top_candidates = argmax

    def classify(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """The fallback runs language models only."""
        raise AssertionError("the model has no classification head")

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [N, logits_width], float32, with whatever the model's own code does
        after its head."""
        self._replay.hidden_1NE = hidden_NE[None]
        try:
            ids_1N = torch.zeros(1, len(hidden_NE), dtype=torch.long, device=hidden_NE.device)
            logits_NV: torch.Tensor = self._model(input_ids=ids_1N, use_cache=False).logits[0]
        finally:
            self._replay.hidden_1NE = None
        return logits_NV.float()

    def _plain_logits(self, ids: list[int]) -> torch.Tensor:
        """The logits [T, V] of one sequence by transformers alone, with its eager attention."""
        self._model.set_attn_implementation("eager")
        self._experts.served = False
        try:
            ids_1T = torch.tensor([ids], device=self._scope.device)
            hidden_1TE = self._replay.decoder(input_ids=ids_1T, use_cache=False).last_hidden_state
            return self.logits(hidden_1TE[0])
        finally:
            self._experts.served = True
            self._model.set_attn_implementation(INTERFACE)

    def _probe(self, config: ConfigReader) -> None:
        """Runs a few tokens to see each attention call; the weights are not there yet, only shapes
        matter. A model built only for its list of weights (on the meta device) is not run."""
        if self._scope.device.type == "meta":
            return
        ids_1T = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=self._scope.device)
        foreign = _foreign_code(f"run {type(self._model).__name__} over rows laid end to end")
        with foreign, self._running(None), torch.inference_mode():
            out = self._replay.decoder(
                input_ids=ids_1T,
                position_ids=torch.arange(PROBE_TOKENS, device=self._scope.device)[None],
                use_cache=False,
            )
        self._replay.output = type(out)
        _refuse_uncovered(config, self._model, self._step.calls)

    def _bind(self, call: _Call) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
        shape = {
            "device": self._scope.kind,
            "dtype": self._scope.dtype,
            "kv_heads": call.kv_heads,
            "head_dim": call.head_dim,
            "block_tokens": self._scope.block_tokens,
        }
        problem = AttentionProblem(
            **shape, heads=call.heads, scale=call.scale, window=call.window, softcap=call.softcap
        )
        write = self._scope.bind(KV_WRITE, KVWriteProblem(**shape))
        return write, self._scope.bind(ATTENTION, problem)

    @contextmanager
    def _running(self, batch: Batch | None) -> Iterator[None]:
        assert not _RUNNING, "two fallback models run at once in one process"
        self._step.batch, self._step.next_layer = batch, 0
        _RUNNING.append(self._step)
        try:
            yield
        finally:
            _RUNNING.pop()
            self._step.batch = None


build = TransformersModel


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H,
    D]."""
    (step,) = _RUNNING
    layer, step.next_layer = step.next_layer, step.next_layer + 1
    if step.batch is None:
        step.calls.append(_seen_call(module, query, key, value, attention_mask, options))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    q_THD, k_TKD, v_TKD = (one[0].transpose(0, 1) for one in (query, key, value))
    value_dim, head_dim = v_TKD.shape[-1], k_TKD.shape[-1]
    if value_dim < head_dim:
        v_TKD = F.pad(v_TKD, (0, head_dim - value_dim))
    write, attend = step.kernels[layer]
    plan: AttentionPlan = step.batch.plans[step.batch.group_of_layer[layer]]
    kv = step.batch.kv[layer]
    write(k_TKD, v_TKD, kv, plan.slot_T)
    return attend(q_THD.contiguous(), kv, plan)[None, :, :, :value_dim], None


def _seen_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> _Call:
    name = type(module).__name__
    extra = sorted(
        key
        for key, value in options.items()
        if isinstance(value, torch.Tensor) and key not in HARMLESS
    )
    if attention_mask is not None:
        extra.append("a mask of its own")
    if options.get("is_causal") is False:
        extra.append("is_causal=False")
    if value.shape[-1] > key.shape[-1]:
        extra.append("values wider than keys")
    if extra:
        raise CheckpointError(
            f"the transformers fallback cannot run {name}: its attention needs {', '.join(extra)}",
            field="architectures",
        )
    head_dim = key.shape[-1]
    scale = options.get("scaling")
    return _Call(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=head_dim,
        value_dim=value.shape[-1],
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )


def _refuse_uncovered(config: ConfigReader, model: nn.Module, calls: list[_Call]) -> None:
    """Every layer must have shown one attention call, and every window of the config must be among
    them."""
    name, layers = type(model).__name__, config.int("num_hidden_layers", aliases=("n_layer",), ge=1)
    if len(calls) != layers:
        raise CheckpointError(
            f"the transformers fallback cannot run {name}: {len(calls)} of its {layers} layers use attention "
            f"that can be paged; the others keep state of another kind; {_instead(config)}",
            field="architectures",
        )
    types = set(config.list("layer_types", None, of=str) or ())
    unknown = sorted(types - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"the transformers fallback cannot run {name}: layer_types names {', '.join(unknown)}",
            field="layer_types",
        )
    window = config.int("sliding_window", None, ge=0)
    used = config.bool("use_sliding_window", True) and types != {"full_attention"}
    if window and used and all(call.window is None for call in calls):
        raise CheckpointError(
            f"the transformers fallback cannot run {name}: its sliding_window ({window}) does not reach "
            "the attention calls",
            field="sliding_window",
        )


def _instead(config: ConfigReader) -> str:
    """What to do about a model that the fallback cannot run."""
    native = family_of(config.raw)
    if native == FALLBACK:
        return "docs/MODELS.md lists the families that run without it"
    return f"without --family {FALLBACK} it runs as {native}"


@contextmanager
def _foreign_code(task: str) -> Iterator[None]:
    """Whatever transformers' model code raises on a use it was not written for becomes a refusal:
    its errors have no common type, and none of them may end in a traceback at start."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the transformers fallback cannot {task}: {type(error).__name__}: {error}",
            field="architectures",
        ) from error


class _Replay(nn.Module):
    """Stands where the decoder was: runs it, or, for the head alone, hands back hidden states
    computed before."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.hidden_1NE: torch.Tensor | None = None
        self.output: type[Any] | None = None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """See the class."""
        if self.hidden_1NE is None:
            return self.decoder(*arguments, **options)
        assert self.output is not None, "the probe notes the decoder's type of output"
        return self.output(last_hidden_state=self.hidden_1NE)


def _empty_model(library: ModuleType, config: ConfigReader, scope: Scope) -> Any:
    """The model with uninitialised weights; buffers such as rope frequencies are computed as
    usual."""
    from transformers.initialization import no_init_weights

    library.AttentionInterface.register(INTERFACE, _attention)
    values = copy.deepcopy(dict(config.raw))
    kind = values.pop("model_type", None)
    try:
        parsed = library.AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{config.where}: transformers {library.__version__} cannot read a config of model_type "
            f"{kind!r} ({error})",
            field="model_type",
        ) from error
    foreign = _foreign_code(f"build a causal language model of model_type {kind!r}")
    with foreign, scope.device, no_init_weights():
        model = library.AutoModelForCausalLM.from_config(
            parsed, attn_implementation=INTERFACE, dtype=scope.dtype
        )
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _replace_decoder(model: Any) -> _Replay:
    replay = _Replay(model.base_model)
    setattr(model, model.base_model_prefix, replay)
    return replay
