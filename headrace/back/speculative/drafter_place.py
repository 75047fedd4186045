"""What the loaders of drafters with weights have in common: where a drafter stands, how a part of a
checkpoint is loaded for it, and how a pair that cannot work is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.load import LoadReport, open_source
from headrace.back.models.load.part import load_part
from headrace.back.models.registry import scope_of
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.stored import Stored
from headrace.back.speculative.network import DraftNetwork
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision, ModelSpec
from headrace.base.errors import ConfigError

FIELD = "speculative_config"
BuildNetwork = Callable[[Scope], DraftNetwork]


@dataclass(frozen=True, kw_only=True)
class DrafterPlace:
    """What all methods build with: the drafter's checkpoint, the loaded model, the device.
    `parallel`: a draft model drafts all tokens in one pass."""

    spec: ModelSpec
    target: Decoder
    device: torch.device
    block_tokens: int
    verify_queries: int
    num_drafts: int
    parallel: bool = False


class LoadableNetwork:
    """A network with what the loader asks for."""

    def __init__(self, scope: Scope, network: DraftNetwork, plan: WeightPlan) -> None:
        self.network = network
        self._ledger = scope.ledger
        self.weights = replace(plan, params=tuple(scope.ledger.params))
        self.decisions: tuple[Decision, ...] = ()

    def finish_load(self) -> None:
        """See Loadable."""
        self._ledger.finish()
        self.decisions = self._ledger.decisions()
        if self._ledger.host_kernels():
            raise refused(f"{self._ledger.host_kernels()[0]} needs the host in every step")


def load_part_of(
    place: DrafterPlace,
    build: BuildNetwork,
    ignored: tuple[str, ...],
    *,
    renamed: tuple[tuple[str, str], ...] = (),
    prefix: str = "",
) -> tuple[DraftNetwork, LoadReport]:
    """The network that `build` makes, with its weights. `ignored`, `renamed`: see WeightPlan;
    `prefix`: where it lies in the checkpoint."""
    plan = WeightPlan(params=(), ignored=ignored, renamed=renamed)

    def make(where: torch.device, stored: Stored | None = None) -> LoadableNetwork:
        scope = scope_of(
            place.spec,
            mesh=Mesh(),
            device=where,
            block_tokens=place.block_tokens,
            verify_queries=place.verify_queries,
            stored=stored,
        )
        inside = scope / prefix if prefix else scope
        return LoadableNetwork(inside, build(inside), plan)

    part, report = load_part(place.spec, make, device=place.device)
    return part.network, report


def reader_of(spec: ModelSpec) -> ConfigReader:
    """The config of the head's layer."""
    where = f"{spec.path}/config.json"
    inner = spec.config.get("transformer_layer_config")
    return ConfigReader(spec.config if inner is None else inner, where)


def names_of(spec: ModelSpec) -> Collection[str] | None:
    """The tensors of a checkpoint; None: it is made up."""
    if spec.format == "dummy":
        return None
    with closing(open_source(spec)) as source:
        return set(source.entries)


def check_width(width: int, vocabulary: int, target: Decoder) -> None:
    """That a head is of this model's sizes."""
    theirs = target.spec.sizes.width
    if width != theirs:
        raise refused(f"the head's hidden size is {width}, the model's {theirs}")
    if vocabulary != target.logits_width:
        raise refused(
            f"the head is of a model of {vocabulary} tokens, this one knows {target.logits_width}"
        )


def checked_taps(place: DrafterPlace, taps: tuple[int, ...]) -> tuple[int, ...]:
    """The layers in front of which hidden states are read, which the model must have."""
    last = min(place.target.taps_until, place.target.spec.sizes.layers)
    if len(set(taps)) != len(taps) or not all(0 <= layer < last for layer in taps):
        raise refused(
            f"the head reads hidden states in front of layers {', '.join(map(str, taps))}, "
            f"the model has layers 0 to {last - 1}"
        )
    return taps


def refused(reason: str) -> ConfigError:
    """The error of the option."""
    return ConfigError(f"--speculative-config: {reason}", field=FIELD)
