"""Diffusion language models whose tokens all see each other: LLaDA 1 and 1.5 (Nie et al. 2025,
arXiv:2502.09992) over Llama's layers, LLaDA-MoE (Zhu et al. 2025, arXiv:2509.24389) over OLMoE's
with a norm of each head, Dream and DiffuCoder (Ye et al. 2025, arXiv:2508.15487) over Qwen 2.5's.

Nothing is cached: a pass computes whole texts, as that of an encoder does. How masks become tokens:
back/runner/canvas.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.logits import LogitsHead
from headrace.back.layers.moe.mixture import Mixture, MixtureSpec, RouterSpec
from headrace.back.layers.norm import RMS
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import (
    Encoder,
    EncoderSizes,
    TokenBranch,
    WholeBranch,
    read_encoder_sizes,
)
from headrace.back.models.eurobert import both_sides_layer
from headrace.base.config.hf import ConfigReader

IGNORED = (r".*\.rotary_emb\.inv_freq",)


class CanvasModel(Encoder):
    """An encoder with a language-model head: `back/models/protocol.py: LoadableModel`."""

    generates = True

    def __init__(self, scope: Scope, config: ConfigReader) -> None:
        sizes = read_encoder_sizes(
            config, eps=1e-5, eps_key="rms_norm_eps", default_activation="silu"
        )
        inside, tied = scope / "model", config.bool("tie_word_embeddings", False)
        words = TokenEmbedding(inside / "embed_tokens", sizes.vocabulary, sizes.width, tied=tied)
        named = config.list("architectures", of=str)[0]
        dream, experts = named == "DreamModel", named == "LLaDAMoEModelLM"
        bias = config.bool("attention_bias", False)
        rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
        mlp = _experts(config, sizes) if experts else None
        normed = experts and config.bool("qk_layernorm", False)
        layers = [
            both_sides_layer(
                inside / "layers" / str(i),
                sizes,
                rope=rope,
                bias=bias or dream,
                out_bias=bias and not experts,
                mlp_bias=config.bool("mlp_bias", False),
                qk_norm=QKNorm(eps=sizes.eps) if normed else None,
                mlp=mlp,
            )
            for i in range(sizes.layers)
        ]
        norm = RMS.build(inside / "norm", sizes.width, eps=sizes.eps)
        table = words if tied else None
        self._head = LogitsHead(scope / "lm_head", sizes.vocabulary, sizes.width, tied=table)

        def embed(batch: Batch) -> torch.Tensor:
            return words.lookup(batch.token_ids_T)

        ignored = (*IGNORED, r"lm_head\.weight") if tied else IGNORED
        super().__init__(
            scope, sizes, embed=embed, layers=layers, norm=norm, classifier=None, ignored=ignored
        )

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See CausalModel."""
        return self._head.logits(hidden_NE)


def build(scope: Scope, config: ConfigReader) -> CanvasModel:
    """LLaDAModelLM, LLaDAMoEModelLM, DreamModel."""
    if config.bool("use_sliding_window", False):
        raise config.wrong("use_sliding_window", "false")
    return CanvasModel(scope, config)


def _experts(config: ConfigReader, sizes: EncoderSizes) -> Callable[[Scope], TokenBranch]:
    """What takes the place of a layer's MLP."""
    count = config.int("num_experts", ge=1)
    listed = config.list("moe_layer_freq", None, of=int)
    if (listed is not None and 0 in listed) or config.raw.get("shared_expert_intermediate_size"):
        key = "moe_layer_freq" if listed and 0 in listed else "shared_expert_intermediate_size"
        raise config.wrong(key, "experts alone in every layer")
    router = RouterSpec(
        experts=count,
        top_k=config.int("num_experts_per_tok", ge=1, le=count),
        renormalize=config.bool("norm_topk_prob", False),
    )
    spec = MixtureSpec(router=router, inner=config.int("expert_intermediate_size", ge=1))

    def mixture(scope: Scope) -> TokenBranch:
        branch = Mixture(scope, spec, sizes.width, activation=sizes.activation, adds=False)
        return WholeBranch(branch)

    return mixture
