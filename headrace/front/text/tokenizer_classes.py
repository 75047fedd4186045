"""Tokenizer classes of transformers whose SentencePiece files are not read as they stand, by the
model's type where no file names the class (tokenizer_pieces.py reads them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARIAN = "MarianTokenizer"
PIECE_FILES = ("source.spm", "sentencepiece.bpe.model", "spiece.model")
BY_MODEL = {
    **{"marian": MARIAN, "m2m_100": "M2M100Tokenizer", "mbart": "MBartTokenizer"},
    **dict.fromkeys(("pegasus", "pegasus_x", "bigbird_pegasus"), "PegasusTokenizer"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5Tokenizer"),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), "SeamlessM4TTokenizer"),
}
CLASSES = frozenset((*BY_MODEL.values(), "MBart50Tokenizer"))


def piece_class(beside: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """That of a folder's tokenizer_config.json and config.json, if it is one of these."""
    stated = beside.get("tokenizer_class") or config.get("tokenizer_class")
    name = str(stated or BY_MODEL.get(str(config.get("model_type")))).removesuffix("Fast")
    name = name.replace("MT5Tokenizer", "T5Tokenizer")
    return name if name in CLASSES else None
