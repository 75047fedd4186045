"""Architectures with an encoder, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENCODER_DECODERS: Mapping[str, str] = {
    "BartForConditionalGeneration": "bart",
    "MBartForConditionalGeneration": "mbart",
    "MvpForConditionalGeneration": "mvp",
    "PLBartForConditionalGeneration": "plbart",
    "BlenderbotForConditionalGeneration": "blenderbot",
    "BlenderbotSmallForConditionalGeneration": "blenderbot_small",
    "LEDForConditionalGeneration": "led",
    "PegasusForConditionalGeneration": "pegasus",
    "PegasusXForConditionalGeneration": "pegasus_x",
    "BigBirdPegasusForConditionalGeneration": "bigbird_pegasus",
    "MarianMTModel": "marian",
    "FSMTForConditionalGeneration": "fsmt",
    "ProphetNetForConditionalGeneration": "prophetnet",
    "M2M100ForConditionalGeneration": "m2m_100",
    "NllbMoeForConditionalGeneration": "nllb_moe",
    "WhisperForConditionalGeneration": "whisper",
    "MoonshineForConditionalGeneration": "moonshine",
    "MoonshineStreamingForConditionalGeneration": "moonshine_streaming",
    "CanaryForConditionalGeneration": "canary",
    "CohereAsrForConditionalGeneration": "canary",
    "Speech2TextForConditionalGeneration": "speech_to_text",
    "SeamlessM4TForSpeechToText": "seamless_m4t",
    "SeamlessM4Tv2ForSpeechToText": "seamless_m4t",
    "SeamlessM4TForTextToText": "seamless_m4t_text",
    "SeamlessM4Tv2ForTextToText": "seamless_m4t_text",
    "EncoderDecoderModel": "bert2bert",
    **dict.fromkeys(("T5ForConditionalGeneration", "T5WithLMHeadModel"), "t5"),
    "MT5ForConditionalGeneration": "mt5",
    "UMT5ForConditionalGeneration": "umt5",
    "LongT5ForConditionalGeneration": "longt5",
    "SwitchTransformersForConditionalGeneration": "switch_transformers",
    "T5GemmaForConditionalGeneration": "t5gemma",
    "T5Gemma2ForConditionalGeneration": "t5gemma2",
    "Florence2ForConditionalGeneration": "florence2",
    "VisionEncoderDecoderModel": "vision_encoder_decoder",
}
"""Architectures whose prompt an encoder reads; their decoder begins with a token of its own."""
DECODERS_ALONE: Mapping[str, str] = {
    f"{base}ForCausalLM": "bart_decoder"
    for base in (
        *("Bart", "MBart", "Mvp", "PLBart", "Blenderbot", "BlenderbotSmall", "Marian", "Pegasus"),
        *("BigBirdPegasus", "Whisper", "TrOCR"),
    )
}
"""Their decoders as language models."""
BIDIRECTIONAL: Mapping[str, str] = {"Gemma3TextModel": "embedding_gemma"}
"""Architectures without a head that are encoders where `use_bidirectional_attention` says so."""
EMBEDDERS: Mapping[str, tuple[str, str]] = {
    "EmbeddingGemma2Model": ("embedding_gemma2", "language_model"),
    "EmbeddingGemma2TextModel": ("embedding_gemma2", ""),
    "LlamaBidirectionalModel": ("eurobert", ""),
    "JinaBertModel": ("jina_bert", ""),
    "JinaBertForMaskedLM": ("jina_bert", ""),
    "T5EncoderModel": ("t5_encoder", ""),
    "MT5EncoderModel": ("t5_encoder", ""),
    "UMT5EncoderModel": ("umt5_encoder", ""),
    "XLNetModel": ("xlnet", ""),
}
"""Architectures without a head whose names say that they are encoders, and where the text part
lies."""
SEES_BOTH_SIDES = frozenset(
    f"{base}{kind}"
    for base in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for kind in ("Model", "ForCausalLM")
)
"""Decoders' names under which `is_causal` may say that each token sees both sides."""
TAGGERS: Mapping[str, str] = {
    "OpenAIPrivacyFilterForTokenClassification": "openai_privacy_filter",
    **dict.fromkeys(("T5ForTokenClassification", "MT5ForTokenClassification"), "t5_encoder"),
    "UMT5ForTokenClassification": "umt5_encoder",
    "XLNetForTokenClassification": "xlnet",
}
"""Encoders with a head that judges tokens, which have no other."""
RERANKERS: Mapping[str, tuple[str, bool]] = {
    "LlamaBidirectionalForSequenceClassification": ("eurobert", False),
    "JinaBertForSequenceClassification": ("jina_bert", True),
    "XLNetForSequenceClassification": ("xlnet", False),
}
"""The same with a head that judges texts, and whether their tensors lack a prefix."""
TEXT_ENCODERS: Mapping[str, str] = {
    "BertForMaskedLM": "bert",
    "RobertaForMaskedLM": "roberta",
    "XLMRobertaForMaskedLM": "roberta",
    "CamembertForMaskedLM": "roberta",
    "MPNetForMaskedLM": "mpnet",
    "AlbertForMaskedLM": "albert",
    "ErnieForMaskedLM": "ernie",
    "EsmForMaskedLM": "esm",
    "LongformerForMaskedLM": "longformer",
    "MegatronBertForMaskedLM": "megatron_bert",
    "RemBertForMaskedLM": "rembert",
    "RoFormerForMaskedLM": "roformer",
    "XLMRobertaXLForMaskedLM": "xlm_roberta_xl",
    "RobertaPreLayerNormForMaskedLM": "roberta_prelayernorm",
    "Data2VecTextForMaskedLM": "data2vec_text",
    "DebertaV2ForMaskedLM": "deberta_v2",
    "DistilBertForMaskedLM": "distilbert",
    "ElectraForMaskedLM": "electra",
    "DebertaForMaskedLM": "deberta",
    "MobileBertForMaskedLM": "mobilebert",
    "SqueezeBertForMaskedLM": "squeezebert",
    "FNetForMaskedLM": "fnet",
    "XLMForMaskedLM": "xlm",
    "FlaubertForMaskedLM": "xlm",
    "LukeForMaskedLM": "luke",
    "XmodForMaskedLM": "xmod",
    "BigBirdForMaskedLM": "big_bird",
    "ConvBertForMaskedLM": "convbert",
    **{"GteForMaskedLM": "gte", "GteNewForMaskedLM": "gte"},
    "NewForMaskedLM": "gte",
    "EuroBertForMaskedLM": "eurobert",
    "UltrabertForMaskedLM": "ultrabert",
    "EsmcForMaskedLM": "esmc",
    "ModernBertForMaskedLM": "modernbert",
    "NomicBertForMaskedLM": "nomic_bert",
    "NeoBERTForMaskedLM": "neobert",
    "JinaEmbeddingsV3ForMaskedLM": "jina_embeddings_v3",
}
"""Encoders, by the name with their language-model head."""
JUDGES: Mapping[str, str] = {
    f"{base}ForSequenceClassification": "bart_classifier" for base in ("Bart", "Mvp", "PLBart")
}
"""Encoder-decoders that judge a text in one step, without a cache."""
ENCODERS = frozenset(
    {
        *("bert", "roberta", "modernbert", "nomic_bert", "jina_embeddings_v3"),
        *("embedding_gemma", "modernvbert", "mpnet", "distilbert", "electra", "gte", "eurobert"),
        *("two_towers", "embedding_gemma2", "deberta_v2", "albert", "ernie", "esm", "rembert"),
        *("t5_encoder", "umt5_encoder", *JUDGES.values(), "longformer"),
        *("megatron_bert", "roformer", "xlm_roberta_xl", "roberta_prelayernorm", "data2vec_text"),
        *("frame_labels", "deberta", "mobilebert", "squeezebert", "fnet", "xlm", "luke", "xmod"),
        *("big_bird", "convbert", "jina_bert", "neobert", "llama_nemotron_vl", "ultrabert"),
        *("esmc", "openai_privacy_filter", "canvas_diffusion", "xlnet"),
    }
)
"""Families that attend in both directions: no KV cache, prompts computed whole; no tokens, but for
the diffusion language models among them."""
HEADLESS = frozenset({"fnet"})
"""Families that mix tokens without attention: their config states no heads."""
FIRST_POSITION = dict.fromkeys(
    (
        "roberta",
        "mpnet",
        "xlm_roberta_xl",
        "roberta_prelayernorm",
        "data2vec_text",
        "esm",
        "longformer",
        "luke",
        "xmod",
    ),
    "pad_token_id",
)
"""Families whose positions begin one behind the id under this key: fewer than are stated."""


def reserved_positions(family: str, config: Mapping[str, Any]) -> int:
    """How many of the stated positions no text can use."""
    if family == "jina_embeddings_v3" and config.get("position_embedding_type") == "absolute":
        family = "roberta"
    if family == "bert2bert":
        config = config.get("decoder") or config
        family = str(config.get("model_type")).removeprefix("xlm-")
    if family == "prophetnet":  # the next token's place is read, too
        return int(config.get("pad_token_id") or 0) + 2
    key = FIRST_POSITION.get(family)
    if key is None:
        return 0
    value = config.get(key, 1)
    return value + 1 if isinstance(value, int) else 0
