"""Loading what is no whole model: a head that drafts for one, from a checkpoint of its own or from
that of its model."""

from __future__ import annotations

from contextlib import closing
from typing import Protocol, TypeVar

import torch

from headrace.back.models.load import (
    LoadReport,
    fill_dummy,
    open_source,
    stored_blocks,
    weight_bytes_of,
)
from headrace.back.models.load.fill import check, fill
from headrace.back.models.load.source import renamed, separate_experts
from headrace.back.models.protocol import Loadable
from headrace.back.quant.stored import Stored
from headrace.base.config.resolved import ModelSpec

Part = TypeVar("Part", bound=Loadable, covariant=True)


class MakePart(Protocol[Part]):
    """Makes what is to be loaded, empty, on a device. `stored`: the tensors that stay quantized as
    they are."""

    def __call__(self, where: torch.device, stored: Stored | None = None) -> Part: ...


def load_part(
    spec: ModelSpec, make: MakePart[Part], *, device: torch.device
) -> tuple[Part, LoadReport]:
    """What `make` makes, with its weights, ready to run. A flaw of the checkpoint is a
    CheckpointError, before anything lies on the device."""
    report = LoadReport()
    if spec.format == "dummy":
        part = make(device)
        fill_dummy(part, spec.seed)
    else:
        part = _filled(spec, make, device)
    report.weight_bytes = weight_bytes_of(part)
    part.finish_load()
    report.decisions += part.decisions
    return part, report


def _filled(spec: ModelSpec, make: MakePart[Part], device: torch.device) -> Part:
    with closing(open_source(spec)) as source:
        meta = torch.device("meta")
        plan = make(meta, stored_blocks(spec, source, device)[0]).weights
        wanted = {piece.name for param in plan.params for piece in param.pieces}
        named = separate_experts(renamed(source, plan.renamed), wanted)
        stored, _ = stored_blocks(spec, named, device)
        check(make(meta, stored).weights, named)
        part = make(device, stored)
        fill(part.weights, named)
    return part
