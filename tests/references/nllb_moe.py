"""NLLB's experts in plain PyTorch, by the paper (NLLB Team et al. 2022: the two experts that a softmax over all weighs
most, their weights summing to 1; what experts give is scaled by what training kept of it) and the keys of
nllb-moe-54b's config.json. transformers 5.23 takes a 0 or 1 of its router's mask for the number of an expert.
"""

from __future__ import annotations

from typing import Any

import torch


def use_chosen_experts(model: Any) -> None:
    """Replaces what transformers' sparse layers compute."""
    for module in model.modules():
        if type(module).__name__ == "NllbMoeSparseMLP":
            module.forward = _forward_of(module, 1.0 - model.config.moe_token_dropout)


def _forward_of(module: Any, kept: float) -> Any:
    experts = list(module.experts.values())

    def forward(x: torch.Tensor, _: Any = None) -> torch.Tensor:
        rows = x.flatten(0, 1)
        chosen = module.router.classifier(rows).softmax(-1).topk(2)
        weights = chosen.values / chosen.values.sum(-1, keepdim=True)
        results = torch.stack(
            [
                sum(
                    weight * expert_of(row)
                    for weight, expert_of in zip(
                        row_weights, (experts[i] for i in ids), strict=True
                    )
                )
                for row, row_weights, ids in zip(rows, weights, chosen.indices, strict=True)
            ]
        )
        return (kept * results).view(x.shape)

    return forward
