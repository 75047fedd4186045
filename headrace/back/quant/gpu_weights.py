"""Which form a weight takes on a GPU: made of floats by a scheme, or kept as the checkpoint holds
it; a parameter that no kernel would read so stays one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from headrace.back.parallel.param import Param
from headrace.back.quant.experts import Floats, MatricesOf
from headrace.back.quant.gpu import OnlineFp8Weight, StoredFp8Weight, served, stored_scheme
from headrace.back.quant.gpu_expert_forms import MixtureSizes, kept_of
from headrace.back.quant.gpu_experts import OnlineGpuExperts, StoredGpuExperts, stored_on_gpu
from headrace.back.quant.gpu_experts import served as served_experts
from headrace.back.quant.gpu_int4 import OnlineInt4Weight, StoredInt4Weight, stored_int4
from headrace.back.quant.gpu_int8 import OnlineInt8Weight, StoredInt8Weight, stored_int8
from headrace.back.quant.gpu_int8 import served as served_int8
from headrace.back.quant.scheme import Scheme
from headrace.back.quant.stored import Stored


class LoadedWeight(Protocol):
    """A weight of a layer, once it is loaded; in which form is the matter of what made it."""

    def take(self) -> Any:
        """What the layer multiplies by, which it then owns alone."""
        ...


def online_on_gpu(weight: Param, scheme: Scheme) -> LoadedWeight:
    """A matrix that is quantized once it is full."""
    if not served(weight):
        return weight
    if scheme.bits == 4:
        return OnlineInt4Weight(weight, scheme)
    if scheme.floating:
        return OnlineFp8Weight(weight, scheme)
    return OnlineInt8Weight(weight, scheme) if served_int8(weight, scheme.group) else weight


def stored_weight_on_gpu(weight: Param, stored: Stored) -> LoadedWeight:
    """A matrix as its checkpoint holds it."""
    if scheme := stored_scheme(weight, stored):
        return StoredFp8Weight(weight, scheme)
    if kept := stored_int4(weight, stored):
        return StoredInt4Weight(weight, kept)
    kept = stored_int8(weight, stored)
    return weight if kept is None else StoredInt8Weight(weight, kept)


def online_experts_on_gpu(
    params: Sequence[Param], floats: Floats, scheme: Scheme, sizes: MixtureSizes
) -> LoadedWeight | None:
    """Experts that are quantized once all `params` are full; None: they stay floats."""
    kept = kept_of(scheme.name)
    if kept is None or not served_experts(sizes):
        return None
    return OnlineGpuExperts(params, floats, kept, sizes)


def stored_experts_on_gpu(
    matrices: Sequence[MatricesOf], stored: Stored, sizes: MixtureSizes, *, device: torch.device
) -> LoadedWeight | None:
    """Experts as their checkpoint holds them; None: they become floats."""
    scheme = stored_on_gpu(matrices, stored, sizes)
    return None if scheme is None else StoredGpuExperts(matrices, scheme, sizes, device=device)
