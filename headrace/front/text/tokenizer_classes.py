"""Tokenizer classes of transformers that are read from other files than tokenizer.json: which one a
folder has, as a file names it, else by the model's type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROPHETNET = "ProphetNetTokenizer"
MARIAN, GPT2, ROBERTA = "MarianTokenizer", "GPT2Tokenizer", "RobertaTokenizer"
PIECE_FILES = ("source.spm", "sentencepiece.bpe.model", "spiece.model")


@dataclass(frozen=True, kw_only=True)
class TokenizerClasses:
    """`by_model`: the class of a model's type; `same`: other names of a class, or of itself."""

    by_model: Mapping[str, str]
    same: Mapping[str, str]

    def of(self, beside: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
        """That of a folder's tokenizer_config.json and config.json, if it is one of these."""
        stated = beside.get("tokenizer_class") or config.get("tokenizer_class")
        name = stated or self.by_model.get(str(config.get("model_type")))
        return self.same.get(str(name).removesuffix("Fast"))


_PIECES = {
    **{"marian": MARIAN, "m2m_100": "M2M100Tokenizer", "mbart": "MBartTokenizer"},
    **dict.fromkeys(("pegasus", "pegasus_x", "bigbird_pegasus"), "PegasusTokenizer"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5Tokenizer"),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), "SeamlessM4TTokenizer"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod"), "XLMRobertaTokenizer"),
}
PIECE_CLASSES = TokenizerClasses(
    by_model=_PIECES,
    same={
        **{name: name for name in (*_PIECES.values(), "MBart50Tokenizer")},
        "MT5Tokenizer": "T5Tokenizer",
    },
)
"""SentencePiece files whose pieces have ids of their own (tokenizer_pieces.py)."""
_WORDS = {
    **dict.fromkeys(("gpt2", "opt", "gpt_neo", "gptj", "codegen", "phi", "starcoder2"), GPT2),
    **dict.fromkeys(("roberta", "bart", "led", "mvp", "longformer", "data2vec-text"), ROBERTA),
    **{"roberta-prelayernorm": ROBERTA, "blenderbot": "BlenderbotTokenizer"},
    **dict.fromkeys(
        ("bert", "distilbert", "electra", "ernie", "megatron-bert", "mobilebert", "squeezebert"),
        "BertTokenizer",
    ),
    "prophetnet": PROPHETNET,
    **dict.fromkeys(("convbert", "nomic_bert", "encoder-decoder"), "BertTokenizer"),
}
WORD_CLASSES = TokenizerClasses(
    by_model=_WORDS,
    same={
        **{name: name for name in _WORDS.values()},
        "CodeGenTokenizer": GPT2,
        **{
            f"{name}Tokenizer": ROBERTA
            for name in ("Bart", "LED", "Mvp", "Longformer", "RobertaPreLayerNorm")
        },
        **{
            f"{name}Tokenizer": "BertTokenizer"
            for name in (
                *("DistilBert", "Electra", "MobileBert", "SqueezeBert", "ConvBert", "Ernie"),
                "Retribert",
            )
        },
    },
)
"""Vocabularies of words in vocab.json with merges.txt, or in vocab.txt (tokenizer_words.py)."""
