"""What of a decoder one stage of a pipeline has: a range of its layers; the first stage what stands
before them, the last one what stands behind. Of a lone stage that is all.

A decoder that is not a plain row of layers, each of which reads the residual alone, is not split.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.models.decoder_layer import DecoderLayerSpec, DecoderSizes, Layer, LayerSpec
from headrace.back.models.families import TOWERS
from headrace.back.models.weights import Param, WeightPlan
from headrace.back.parallel.collectives import Partial
from headrace.back.parallel.mesh import Axis
from headrace.back.parallel.pipe import Pipe
from headrace.back.parallel.stages import layers_of_stages
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

P = TypeVar("P")
DATA = (bool, int, float, complex, str, bytes, Enum, torch.dtype, re.Pattern)


class ReceivedResidual:
    """ids_T -> x_TE that the stage before has left: an embedding to the layers behind it."""

    def __init__(self, pipe: Pipe, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pipe, self._width = pipe, width
        self._new = {"dtype": dtype, "device": device}

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Waits for them."""
        return self._pipe.receive_into(torch.empty((ids_T.shape[0], self._width), **self._new))


class SentResidual:
    """The residual of this stage's layers goes to the next one, a norm that does nothing."""

    fusible = None

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def norm(self, residual_TE: torch.Tensor) -> torch.Tensor:
        """Sends it as it is."""
        self._pipe.send_on(residual_TE)
        return residual_TE

    def add_norm(self, branch_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """Sends it with the branch."""
        return self.norm(residual_TE.add_(branch_TE))

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Sends it with the sum of the ranks' shares."""
        return self.add_norm(partial.total(), residual_TE)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`layers`: this stage's, by their numbers in the model. `pipe`: None where there is one stage.
    `whole`: the names of all tensors of the model, of a stage among others."""

    layers: range
    is_first: bool = True
    is_last: bool = True
    pipe: Pipe | None = None
    whole: frozenset[str] = frozenset()

    def last_writer(self, layers: Sequence[Layer]) -> Layer | None:
        """The layer behind which a step goes on with its rows' last tokens: the last one that
        writes a cache, on the last stage."""
        writers = [layer for layer in layers if layer.kv_forms]
        if not writers:
            raise ConfigError(
                f"layers {self.layers.start} to {self.layers.stop - 1} have no KV cache, which each "
                "stage of --pipeline-parallel needs: see --pipeline-layers",
                field="pipeline_layers",
            )
        return writers[-1] if self.is_last else None

    def received(self, width: int, scope: Scope) -> ReceivedResidual | NoEmbeddings:
        """What stands in place of the embeddings."""
        assert self.pipe is not None, "there is no stage before the only one"
        return ReceivedResidual(self.pipe, width, scope.dtype, scope.device)

    def sent(self) -> SentResidual | None:
        """What stands in place of the last norm."""
        assert self.pipe is not None, "there is no stage behind the only one"
        return SentResidual(self.pipe)

    def others(self, params: Iterable[Param]) -> tuple[str, ...]:
        """Patterns of the tensors that other stages have alone; `params` are this one's."""
        ours = _names(params)
        return tuple(
            sorted({re.escape(_module(name)) + ".*" for name in self.whole - ours if _module(name)})
        )

    def built(self, spec: P) -> P:
        """What of the specification is built but for layers of other stages: all."""
        return spec


class NoEmbeddings:
    """ids_T -> zeros [T, E], of which an encoder's rows take their places."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width = width
        self._new = {"dtype": dtype, "device": device}

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Whatever the tokens are."""
        return torch.zeros((ids_T.shape[0], self._width), **self._new)


@dataclass(frozen=True, kw_only=True)
class NoStage(Stage):
    """Nothing of the decoder, of a server that encodes for others: no table of tokens, no layers,
    norm or head."""

    def last_writer(self, layers: Sequence[Layer]) -> Layer | None:
        """No layer."""
        return None

    def received(self, width: int, scope: Scope) -> NoEmbeddings:
        """What stands in place of the embeddings."""
        return NoEmbeddings(width, scope.dtype, scope.device)

    def sent(self) -> None:
        """Nothing stands in place of the last norm."""
        return

    def others(self, params: Iterable[Param]) -> tuple[str, ...]:
        """All tensors but those that are read are the decoder's."""
        return (".*",)

    def built(self, spec: P) -> P:
        """Without what reads tokens beside the layers."""
        nothing: Any = {
            "layers": (),
            "layer_inputs": None,
            "streams": None,
            "embedding_width": None,
        }
        return replace(spec, **nothing)  # type: ignore[type-var]  # a frozen dataclass


class DecoderParts(Protocol):
    """What of a decoder's specification says whether it can be split."""

    @property
    def sizes(self) -> DecoderSizes: ...

    @property
    def layers(self) -> tuple[DecoderLayerSpec, ...]: ...

    @property
    def streams(self) -> object: ...

    @property
    def layer_inputs(self) -> object: ...


class BuildWhole(Protocol):
    """Builds the whole decoder, for its weights alone."""

    def __call__(self, scope: Scope) -> WeightPlan: ...


def stage_of(scope: Scope, spec: DecoderParts, build: BuildWhole) -> Stage:
    """This rank's stage; ConfigError where the decoder cannot be split as asked."""
    if scope.head.kind == TOWERS:
        return NoStage(layers=range(0), is_first=False, is_last=False)
    axis = scope.mesh.pp
    if axis.size == 1:
        return Stage(layers=range(len(spec.layers)))
    reason = unsplit_reason(spec)
    if reason is not None:
        raise ConfigError(
            f"--pipeline-parallel {axis.size}: {reason}; use --tensor-parallel",
            field="pipeline_parallel",
        )
    whole = _without_memory(scope)
    plan = build(whole)
    if scope.adapters is not None and whole.adapters is not None:
        scope.adapters.elsewhere = whole.adapters.modules
    shared = spec.sizes.tied and scope.head.kind == "lm"  # the first of all: the table of tokens
    in_layers = {id(param) for params in plan.layers for param in params}
    places = [i for i, param in enumerate(plan.params) if id(param) in in_layers]
    layer_bytes = [_bytes(params) for params in plan.layers]
    counts = layers_of_stages(
        scope.mesh.stage_layers,
        axis.size,
        layer_bytes,
        before=_bytes(plan.params[: places[0]]),
        behind=_bytes(plan.params[places[-1] + 1 :]) + _bytes(plan.params[: int(shared)]),
    )
    stops = list(accumulate(counts))
    scope.ledger.note(_decision(scope, counts))
    return Stage(
        layers=range(stops[axis.rank] - counts[axis.rank], stops[axis.rank]),
        is_first=axis.rank == 0,
        is_last=axis.rank == axis.size - 1,
        pipe=scope.mesh.pipe,
        whole=_names(plan.params),
    )


def unsplit_reason(spec: DecoderParts) -> str | None:
    """Why a decoder is not split into stages."""
    if spec.streams is not None:
        return "the model's residual is more than one vector a token, which stages do not hand on"
    if spec.layer_inputs is not None:
        return "the model's layers read the tokens beside the residual, which stages do not hand on"
    for layer in spec.layers:
        if type(layer) is not LayerSpec or layer.tail is not None or _places(layer):
            return "a layer of the model reads more than the residual, which stages do not hand on"
    return None


def _without_memory(scope: Scope) -> Scope:
    """The scope of the whole model on the meta device, which leaves nothing behind."""
    slots = scope.adapters
    return replace(
        scope,
        ledger=Ledger(),
        mesh=replace(scope.mesh, pp=Axis(name="pp"), pipe=None),
        device=torch.device("meta"),
        adapters=slots
        and AdapterSlots(count=slots.count, max_rank=slots.max_rank, kinds=slots.kinds),
        offload=None,
        hollow=False,
    )


def _bytes(params: Sequence[Param]) -> int:
    """Of all ranks together, which is the same on each."""
    return sum(_size(param) for param in params)


def _size(param: Param) -> int:
    if param.bundle is None:
        return math.prod(param.shape) * param.dtype.itemsize
    return sum(
        math.prod(param.bundle.local_shape(member, param.shape, len(param.pieces)))
        * member.dtype.itemsize
        for member in param.bundle.members
    )


def _names(params: Iterable[Param]) -> frozenset[str]:
    return frozenset(piece.name for param in params for piece in param.pieces)


def _module(name: str) -> str:
    """With its last dot: what all tensors that may stand for a quantized one begin with."""
    return name[: name.rfind(".") + 1]


def _decision(scope: Scope, counts: tuple[int, ...]) -> Decision:
    shown = ", ".join(map(str, counts))
    stated = bool(scope.mesh.stage_layers)
    why = "as stated" if stated else "the bytes of the stages are as alike as layers allow"
    return Decision("layers of stages", shown if stated else "auto", shown, why)


def _places(spec: object) -> bool:
    """Whether a specification holds a place where one layer leaves something for others: anything
    that is no data."""
    if dataclasses.is_dataclass(spec):
        return any(_places(getattr(spec, field.name)) for field in dataclasses.fields(spec))
    if isinstance(spec, Mapping):
        return any(map(_places, spec.values()))
    if isinstance(spec, tuple | list | frozenset):
        return any(map(_places, spec))
    return not (spec is None or callable(spec) or isinstance(spec, DATA))
