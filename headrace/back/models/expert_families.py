"""Decoders that attend in every layer, with MLPs of experts, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

EXPERTS: Mapping[str, str] = {
    "JetMoeForCausalLM": "jetmoe",
    "Llama4ForCausalLM": "llama4",
    "FlexOlmoForCausalLM": "flex_olmo",
    "PhimoeForCausalLM": "phimoe",
    "PhiMoEForCausalLM": "phimoe",
    "Step3p5ForCausalLM": "step3p5",
    "SarvamMoEForCausalLM": "sarvam_moe",
    "SarvamMLAForCausalLM": "deepseek",
    "Mistral4ForCausalLM": "mistral4",
    "AfmoeForCausalLM": "afmoe",
    "HYV3ForCausalLM": "hy_v3",
    "HYV4ForCausalLM": "hy_v4",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    **dict.fromkeys(("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), "exaone_moe"),
    "GraniteMoeSWAForCausalLM": "granitemoe_swa",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "DbrxForCausalLM": "dbrx",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "AXK1ForCausalLM": "axk1",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "SolarOpenForCausalLM": "solar_open",
    "Dots1ForCausalLM": "dots1",
    "Dots3NoteForCausalLM": "dots3_note",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3VLForCausalLM": "minimax_m3",
    "GptOssForCausalLM": "gpt_oss",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "Kolibri1ForCausalLM": "kolibri1",
    "FlintForCausalLM": "flint",
    "MellumForCausalLM": "mellum",
    "LagunaForCausalLM": "laguna",
    "AXK2ForCausalLM": "axk2",
    "LongcatFlashForCausalLM": "longcat_flash",
}
"""By the name with their language-model head."""
EXPERTS_PUBLISHED: Mapping[str, str] = {
    **dict.fromkeys(("Grok1ForCausalLM", "Grok1ModelForCausalLM", "GrokForCausalLM"), "grok"),
    "ArcticForCausalLM": "arctic",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "MiMoV2ForCausalLM": "mimo_v2_flash",
    "DeepseekForCausalLM": "deepseek_moe",
    **dict.fromkeys(("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"), "bailing_moe"),
    "Param2MoEForCausalLM": "bailing_moe",
}
"""The same under names that `transformers` has no class for."""
