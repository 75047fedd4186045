"""Decoders under names that `transformers` has no class for, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

PUBLISHED: Mapping[str, str] = {
    **dict.fromkeys(
        ("LLaMAForCausalLM", "AquilaForCausalLM", "XverseForCausalLM", "YiForCausalLM"), "llama"
    ),
    "IQuestCoderForCausalLM": "llama",
    **dict.fromkeys(("InternLMForCausalLM", "PanguEmbeddedForCausalLM"), "internlm"),
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "internlm3",
    "DeepseekForCausalLM": "deepseek_moe",
    "ExaoneForCausalLM": "exaone",
    "MiniCPMForCausalLM": "minicpm",
    "OrionForCausalLM": "orion",
    "MiMoForCausalLM": "mimo",
    **dict.fromkeys(("BaichuanForCausalLM", "BaiChuanForCausalLM"), "baichuan"),
    **dict.fromkeys(("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"), "bailing_moe"),
    **dict.fromkeys(
        (
            "BailingMoeLinearForCausalLM",
            "BailingMoeLinearV2ForCausalLM",
            "BailingMoeV2_5ForCausalLM",
        ),
        "bailing_moe_linear",
    ),
    **dict.fromkeys(("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), "minimax_text_01"),
    **dict.fromkeys(("ChatGLMModel", "ChatGLMForConditionalGeneration"), "chatglm"),
    "QWenLMHeadModel": "qwen",
    "JAISLMHeadModel": "jais",
    "DeciLMForCausalLM": "deci",
    "OpenELMForCausalLM": "openelm",
    "RWForCausalLM": "falcon",
    "StableLMEpochForCausalLM": "stablelm",
}
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "YiForCausalLM": (
        (r"\.ln1\.", ".input_layernorm."),
        (r"\.ln2\.", ".post_attention_layernorm."),
    ),
    "T5Gemma2ForConditionalGeneration": ((r"^model\.encoder\.text_model\.", "model.encoder."),),
}
"""What tensors of an architecture are called that its family calls otherwise: see WeightPlan."""
HEAD_NAMES: Mapping[str, str] = {"InternLM2ForRewardModel": "v_head"}
"""Where the head of a decoder that judges lies, if not under `score`."""
DEEP_HEADS = frozenset({"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"})
"""Decoders whose head has two layers."""
