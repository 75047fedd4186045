"""Decoders under names that `transformers` has no class for: their families, what their tensors and
heads are called, and which do not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.back.models.dense_families import DENSE_PUBLISHED
from headrace.back.models.diffusion_families import BLOCKS_PUBLISHED
from headrace.back.models.expert_families import EXPERTS_PUBLISHED
from headrace.back.models.not_built import BLOCKED
from headrace.back.models.recurrent_families import RECURRENT_DECODERS_PUBLISHED
from headrace.base.config.refused import refuse_remote_code
from headrace.base.errors import CheckpointError

PUBLISHED: Mapping[str, str] = {
    **DENSE_PUBLISHED,
    **EXPERTS_PUBLISHED,
    **RECURRENT_DECODERS_PUBLISHED,
    **BLOCKS_PUBLISHED,
}
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "BitnetForCausalLM": (
        (r"\.inner_attn_ln\.", ".attn_sub_norm."),
        (r"\.ffn_layernorm\.", ".ffn_sub_norm."),
    ),
    "Fairseq2LlamaForCausalLM": (
        (r"^decoder_frontend\.embed\.", "model.embed_tokens."),
        (r"^decoder\.", "model."),
        (r"^final_proj\.", "lm_head."),
        (r"\.self_attn_layer_norm\.", ".input_layernorm."),
        (r"\.ffn_layer_norm\.", ".post_attention_layernorm."),
        (r"\.layer_norm\.", ".norm."),
        (r"\.self_attn\.output_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.gate_proj\.", ".mlp.gate_proj."),
        (r"\.ffn\.inner_proj\.", ".mlp.up_proj."),
        (r"\.ffn\.output_proj\.", ".mlp.down_proj."),
    ),
    "YiForCausalLM": (
        (r"\.ln1\.", ".input_layernorm."),
        (r"\.ln2\.", ".post_attention_layernorm."),
    ),
    "KORMoForCausalLM": (
        (r"\.pre_attention_layernorm\.", ".input_layernorm."),
        (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    ),
    "Grok1ModelForCausalLM": (
        (r"\.attn\.", ".self_attn."),
        (r"\.moe_block\.", ".block_sparse_moe."),
        (r"\.linear\.weight$", ".w1.weight"),
        (r"\.linear_v\.weight$", ".w3.weight"),
        (r"\.linear_1\.weight$", ".w2.weight"),
        (r"norm\.scale$", "norm.weight"),
    ),
    "LLaDAModelLM": (
        (r"^model\.transformer\.wte\.", "model.embed_tokens."),
        (r"^model\.transformer\.ln_f\.", "model.norm."),
        (r"^model\.transformer\.ff_out\.", "lm_head."),
        (r"^model\.transformer\.blocks\.", "model.layers."),
        (r"\.([qkv])_proj\.", r".self_attn.\1_proj."),
        (r"\.attn_out\.", ".self_attn.o_proj."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ff_norm\.", ".post_attention_layernorm."),
        (r"\.ff_proj\.", ".mlp.gate_proj."),
        (r"\.up_proj\.", ".mlp.up_proj."),
        (r"\.ff_out\.", ".mlp.down_proj."),
    ),
    "BailingMoeV3ForCausalLM": ((r"\.attention\.o_proj\.", ".attention.dense."),),
    "T5Gemma2ForConditionalGeneration": ((r"^model\.encoder\.text_model\.", "model.encoder."),),
}
"""What tensors of an architecture are called that its family calls otherwise: see WeightPlan."""
HEAD_NAMES: Mapping[str, str] = {
    "InternLM2ForRewardModel": "v_head",
    "LlamaForClassification": "classification_head",
}
"""Where the head of a decoder that judges lies, if not under `score`."""
DEEP_HEADS = frozenset({"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"})
"""Decoders whose head has two layers."""


def refuse_not_built(config: Mapping[str, Any], where: str) -> None:
    """Refuses an architecture of BLOCKED with its reason, and one that needs code of its own."""
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else None
    reason = BLOCKED.get(named) if isinstance(named, str) else None
    if reason is not None:
        raise CheckpointError(
            f"{where}: {named} is not built: {reason}; docs/MODELS.md lists what runs",
            field="architectures",
        )
    refuse_remote_code(config, where)
