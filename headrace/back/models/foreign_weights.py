"""The weights of a model that runs by transformers' own code, as its checkpoints name them."""

from __future__ import annotations

import re
from typing import Any

import torch

from headrace.back.models.weights import Param, WeightPiece, WeightPlan
from headrace.base.errors import CheckpointError


class _Views(torch.Tensor):
    """A tensor whose parts stay views, so that transformers' renaming and splitting of a state dict
    (per-expert weights, say) says where in our parameters each tensor of the checkpoint belongs."""

    def contiguous(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """The same storage, unlike torch's."""
        return self


def foreign_weights(model: Any) -> WeightPlan:
    """Every stored tensor under its name in checkpoints; a tied one once."""
    from transformers.core_model_loading import revert_weight_conversion

    stored = model.state_dict()
    own = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    kept = {name: stored[name].data for name in own if name in stored}
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept.values()}
    views = {name: tensor.as_subclass(_Views) for name, tensor in kept.items()}
    params = []
    for name, view in revert_weight_conversion(model, views).items():
        if view.untyped_storage().data_ptr() not in storages:
            raise CheckpointError(
                f"the transformers fallback cannot run {type(model).__name__}: its checkpoints store {name} "
                "in a form that is computed on, not only renamed or split, while loading",
                field="architectures",
            )
        params.append(_param(name, view.as_subclass(torch.Tensor)))
    tied = tuple(re.escape(name) for name in stored if name not in kept)
    return WeightPlan(params=tuple(params), ignored=(r".*\.rotary_emb\.inv_freq", *tied))


def _param(name: str, tensor: torch.Tensor) -> Param:
    shape = tuple(tensor.shape)
    return Param(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        pieces=(WeightPiece(name=name, shape=shape),),
        tensor=tensor,
        init="ones" if tensor.dim() == 1 and name.endswith("weight") else "normal",
    )
