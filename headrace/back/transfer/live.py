"""What a running model holds: the values of one checkpoint tensor, and a hash of everything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from headrace.back.layers.scope import Ledger
from headrace.back.models.load import Origin
from headrace.back.models.weights import copies
from headrace.back.transfer.graph import owner_of, reached
from headrace.back.transfer.shadow import Shadow
from headrace.base.errors import InvalidRequest


def values_of(origin: Origin, name: str, count: int) -> list[float]:
    """The first `count` values of a checkpoint tensor, of this rank's part of it. InvalidRequest
    where it is kept packed, or unknown."""
    shadow = Shadow(origin)
    for unit in shadow.units:
        for param in unit.own:
            cuts = [copy for copy in copies(param) if copy.name == name]
            if not cuts:
                continue
            shadow.finish_part(unit)
            live = shadow.live_of(unit, param)
            parts = [live[copy.target].flatten()[:count].float().cpu() for copy in cuts]
            return [float(value) for value in torch.cat(parts)[:count]]
    raise InvalidRequest(f"name: the model has no tensor {name!r:.200}", field="name")


def digest_of(origin: Origin) -> str:
    """SHA-256 over everything that was made of the parameters, in the order of the layers."""
    total = hashlib.sha256()
    for whole in held_tensors(origin.ledger):
        total.update(whole.cpu().numpy().data)
    return total.hexdigest()


def held_tensors(ledger: Ledger) -> Iterator[torch.Tensor]:
    """The bytes of each storage that was made of the parameters, in the order of the layers."""
    seen: set[int] = set()
    for finish in ledger.finished:
        for tensor in reached(owner_of(finish), set()):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
