"""Decoders of which layers keep a state, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

RECURRENT_DECODERS: Mapping[str, str] = {
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "falcon_mamba",
    "JambaForCausalLM": "jamba",
    "Mamba2ForCausalLM": "mamba2",
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "Zamba2ForCausalLM": "zamba2",
    "ZambaForCausalLM": "zamba",
    "ZayaForCausalLM": "zaya",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "RwkvForCausalLM": "rwkv",
    "xLSTMForCausalLM": "xlstm",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm3ForCausalLM": "lfm3",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "KimiLinearForCausalLM": "kimi_linear",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "MiniMaxForCausalLM": "minimax",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen4ExpForCausalLM": "qwen4",
}
"""By the name with their language-model head; some attend in other layers, or have experts."""
RECURRENT_DECODERS_PUBLISHED: Mapping[str, str] = {
    "KimiK3ForCausalLM": "kimi_linear",
    "LFM2ForCausalLM": "lfm2",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "NemotronHPuzzleForCausalLM": "nemotron_h",
    **dict.fromkeys(
        (
            "BailingMoeLinearForCausalLM",
            "BailingMoeLinearV2ForCausalLM",
            "BailingMoeV2_5ForCausalLM",
        ),
        "bailing_moe_linear",
    ),
    **dict.fromkeys(("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), "minimax_text_01"),
    **dict.fromkeys(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), "rwkv7"),
    "Rwkv6ForCausalLM": "rwkv6",
    **dict.fromkeys(("Plamo2ForCausalLM", "PLaMo2ForCausalLM"), "plamo2"),
    **dict.fromkeys(("RwkvHybridForCausalLM", "RWKV6Qwen2ForCausalLM"), "rwkv_hybrid"),
    "Phi4FlashForCausalLM": "phi4_flash",
    "JetNemotronForCausalLM": "jet_nemotron",
    "AliceAIForCausalLM": "alice_ai",
    "BerryLMForCausalLM": "berrylm",
}
"""The same under names that `transformers` has no class for."""
RWKV = ("rwkv", "rwkv6", "rwkv7", "rwkv_hybrid")
"""Families of its layers alone."""
RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba", "xlstm", *RWKV})
"""Families without attention: their config states neither heads nor a longest text."""
