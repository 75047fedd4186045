"""Embedders and rerankers under names that say what their head is, as rows for `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

COLBERT = "HF_ColBERT"
"""BERT below a projection of every token (Khattab and Zaharia 2020), as its authors store it."""
COLBERTS = frozenset(
    {COLBERT, "ColBERTModel", "ColBERTModernBertModel"}
    | {"ColBERTJinaRobertaModel", "ColBERTLfm2Model"}
)
"""The names of the same around other models."""
BGE_M3, SPLADE = "BgeM3EmbeddingModel", "BertSpladeSparseEmbeddingModel"
GRITLM = "GritLM"
JINA_RANKING, JINA_V5 = "JinaForRanking", "JinaEmbeddingsV5Model"
WEIGH_WORDS = frozenset({"bert"})
"""Families with a head that weighs words."""
PAIRS: Mapping[str, tuple[str, str]] = {
    "LlamaBidirectionalForSequenceClassification": ("question:", " \n \n passage:"),
}
"""What stands before the query and before the document, of models that judge pairs."""
VOYAGE = "VoyageQwen3BidirectionalEmbedModel"
NEMOTRON_VL, NEMOTRON_JUDGE = "LlamaNemotronVLModel", "LlamaNemotronVLForSequenceClassification"
SEEING_POOLERS = frozenset({NEMOTRON_VL, NEMOTRON_JUDGE})
"""Those of POOLERS that see."""
POOLERS: Mapping[str, tuple[str, str, bool]] = {
    "ColBERTModel": ("bert", "none", False),
    "ColBERTModernBertModel": ("modernbert", "none", True),
    "ColBERTJinaRobertaModel": ("jina_embeddings_v3", "none", False),
    "ColBERTLfm2Model": ("lfm2", "none", True),
    BGE_M3: ("roberta", "none", True),
    SPLADE: ("bert", "words", False),
    JINA_RANKING: ("qwen3", "none", False),
    JINA_V5: ("qwen3", "none", True),
    VOYAGE: ("eurobert", "none", False),
    NEMOTRON_VL: ("llama_nemotron_vl", "none", False),
    NEMOTRON_JUDGE: ("llama_nemotron_vl", "sequence", False),
    "LlamaEmbeddingModel": ("llama", "none", True),
    "LlamaForClassification": ("llama", "sequence", False),
}
"""Family, head and whether tensors lack the prefix of a whole model."""
