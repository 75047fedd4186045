"""The text part of models with several, as rows for `families.py`: its family and its place."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.models.hearing_families import TEXT_OF_HEARING

TEXT_SECTIONS = ("text_config", "llm_config")
"""Where the text part's keys are."""
TEXT_TYPES: Mapping[str, str] = {
    **TEXT_OF_HEARING,
    "llama": "llama",
    "emu3_text_model": "emu3",
    "internlm2": "internlm2",
    "phi3": "phi3",
    **{"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe"},
    "gpt_oss": "gpt_oss",
    "opt": "opt",
    "stablelm": "stablelm",
    "lfm2": "lfm2",
    "lfm3": "lfm3",
    "lfm2_moe": "lfm2_moe",
    "mistral": "mistral",
    "ministral3": "ministral3",
    "mistral4": "mistral4",
    "mistral_large4_text": "mistral_large4",
    **{"kimi_k2": "deepseek", "kimi_linear": "kimi_linear"},
    **{"step3_text": "step3", "step3p5": "step3p5"},
    **{"deepseek": "deepseek_moe", "deepseek_v2": "deepseek_v2", "deepseek_v3": "deepseek"},
    "llama4_text": "llama4",
    **{"aria_text": "aria_text", "granite_docling_text": "granite"},
    "hunyuan_vl_text": "hunyuan_v1",
    "minimax_m3_vl_text": "minimax_m3",
    "glm5_next_text": "glm5_next",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "exaone4_5_text": "exaone4",
    "hyperclovax": "hyperclovax",
    "glm_ocr_text": "glm4",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "nemotron_h": "nemotron_h",
    **{"gemma": "gemma", "gemma2": "gemma2", "persimmon": "persimmon"},
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    **{"gemma4_text": "gemma4", "gemma4_unified_text": "gemma4_unified"},
    **{"qwen4_exp_text": "qwen4", "muse_glimmer_text": "muse_glimmer"},
    "muse_spark_text": "muse_spark",
    **{"inkling_text": "inkling", "inkling_model": "inkling", "inkling2_text": "inkling2"},
    "mllama_text_model": "mllama",
}
"""Families of the text part of models with several, by its `model_type`."""
WRAPPERS: Mapping[str, str] = {
    "MllamaForConditionalGeneration": "language_model",
    "KimiK3ForConditionalGeneration": "language_model",
}
"""Architectures with several parts, of which the text part is served, and where it lies."""
BASES_WITHIN: Mapping[str, str] = {
    "Emu3ForConditionalGeneration": "model.text_model",
    "Qwen4ExpForConditionalGeneration": "model.language_model",
    "MuseGlimmerForConditionalGeneration": "model.language_model",
    "MuseSparkForConditionalGeneration": "model.language_model",
    "InklingForConditionalGeneration": "model.llm",
    "Inkling2ForConditionalGeneration": "model.llm",
}
"""The same, where the head stands apart from the rest of the text part, which lies here."""
