"""Which family builds an architecture that takes images, video or audio beside text."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.models.hearing_families import HEARING

WITH_MEDIA: Mapping[str, str] = {
    **HEARING,
    "ModernVBertModel": "modernvbert",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v",
    "Glm46VForConditionalGeneration": "glm4v",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
    "LlavaForConditionalGeneration": "llava",
    "Kimi_K25ForConditionalGeneration": "kimi_k25",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "Llama4ForConditionalGeneration": "llama4_vision",
    "LlavaNextForConditionalGeneration": "llava",
    "LlavaNextVideoForConditionalGeneration": "llava",
    "VipLlavaForConditionalGeneration": "llava",
    "LlavaOnevisionForConditionalGeneration": "llava",
    "Ovis2ForConditionalGeneration": "ovis2",
    "Step3p7ForConditionalGeneration": "step3p7",
    "Mistral3ForConditionalGeneration": "llava",
    "AyaVisionForConditionalGeneration": "aya_vision",
    "Cohere2VisionForConditionalGeneration": "aya_vision",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv",
    "MiniCPMOcrForConditionalGeneration": "minicpmv",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2",
    "NemotronH_Omni_Reasoning_V3": "nemotron_omni",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_omni",
    "GotOcr2ForConditionalGeneration": "got_ocr2",
    "DeepseekVLForConditionalGeneration": "deepseek_vl",
    "JanusForConditionalGeneration": "deepseek_vl",
    "VideoLlama3ForConditionalGeneration": "deepseek_vl",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "Exaone4_5_ForConditionalGeneration": "exaone4_5",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax_vision",
    "GlmOcrForConditionalGeneration": "glm4v",
    "Glm5NextForConditionalGeneration": "glm5_vision",
    "QianfanOCRForConditionalGeneration": "internvl",
    "InternVLForConditionalGeneration": "internvl",
    "InternVLChatModel": "internvl",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "Gemma3ForConditionalGeneration": "gemma3_vision",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl",
    "PaliGemmaForConditionalGeneration": "paligemma",
    "Gemma4ForConditionalGeneration": "gemma4_vision",
}
"""Architectures that take images or more beside text: the family reads the whole config."""
