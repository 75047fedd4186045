"""Architectures of models that hear, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

HEARING: Mapping[str, str] = {
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "VoxtralForConditionalGeneration": "voxtral",
    "VoxtralRealtimeForConditionalGeneration": "voxtral_realtime",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni",
    "MoonshotKimiaForCausalLM": "kimia",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_diarize",
    "GraniteSpeechForConditionalGeneration": "granite_speech",
    "GraniteSpeechPlusForConditionalGeneration": "granite_speech",
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3",
    "GlmAsrForConditionalGeneration": "glm_asr",
    "Gemma3nForConditionalGeneration": "gemma3n_audio",
}
"""Their families."""
TEXT_OF_HEARING: Mapping[str, str] = {
    "qwen3_asr_text": "qwen3",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "granite": "granite",
}
"""Families of their text part, by its `model_type`."""
