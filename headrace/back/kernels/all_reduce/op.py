"""Sums over the ranks of an axis: whether by kernels of our own. Imports no Triton where there is
nothing to choose."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.peers import PeersUnavailable
from headrace.base.config.resolved import Decision


def with_sums(
    mesh: Mesh, device: torch.device, dtype: torch.dtype
) -> tuple[Mesh, tuple[Decision, ...]]:
    """The mesh whose tensor-parallel sums go the quickest way, and what was decided; every rank
    calls it."""
    axis = mesh.tp
    if axis.size == 1 or device.type != "cuda":
        return mesh, ()
    try:
        from headrace.back.kernels.all_reduce.measured import measured_sums

        sums = measured_sums(axis, device, dtype)
    except (ImportError, PeersUnavailable) as error:
        return mesh, (Decision("all_reduce", "auto", "library", f"no kernel of ours: {error}"),)
    decision = Decision("all_reduce", "auto", sums.chosen, sums.why)
    return replace(mesh, tp=replace(axis, summing=sums)), (decision,)
