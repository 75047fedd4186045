"""Architectures with an encoder, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

ENCODER_DECODERS: Mapping[str, str] = {
    "BartForConditionalGeneration": "bart",
    "MBartForConditionalGeneration": "mbart",
    "PegasusForConditionalGeneration": "pegasus",
    "MarianMTModel": "marian",
    "M2M100ForConditionalGeneration": "m2m_100",
    "WhisperForConditionalGeneration": "whisper",
    "T5ForConditionalGeneration": "t5",
    "MT5ForConditionalGeneration": "mt5",
    "UMT5ForConditionalGeneration": "umt5",
}
"""Architectures whose prompt an encoder reads; their decoder begins with a token of its own."""
BIDIRECTIONAL: Mapping[str, str] = {"Gemma3TextModel": "embedding_gemma"}
"""Architectures without a head that are encoders where `use_bidirectional_attention` says so."""
EMBEDDERS: Mapping[str, tuple[str, str]] = {
    "EmbeddingGemma2Model": ("embedding_gemma2", "language_model"),
    "EmbeddingGemma2TextModel": ("embedding_gemma2", ""),
}
"""Architectures without a head whose names say that they are encoders, and where the text part
lies."""
ENCODERS = frozenset(
    {
        *("bert", "roberta", "modernbert", "nomic_bert", "jina_embeddings_v3"),
        *("embedding_gemma", "modernvbert", "mpnet", "distilbert", "electra", "gte", "eurobert"),
        *("two_towers", "embedding_gemma2", "deberta_v2"),
    }
)
"""Families that attend in both directions: no KV cache, prompts computed whole, no tokens."""
