"""Keys of published config.json files (published_keys.py) of encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.back.models.key_names import Keys, called
from headrace.back.models.pooling_families import COLBERT
from headrace.base.config.hf import ConfigReader

HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
QK_POST_NORM = "qk-post-norm"
"""In the name of Jina's code for BERT that norms queries and keys."""


def _llama_classes(config: ConfigReader) -> Keys:
    """SGLang's classifier has a key of its own for the number of its labels."""
    return {"num_labels": config.int("classification_out_size", ge=1), "id2label": None}


def bidirectional(config: ConfigReader) -> Keys:
    """NVIDIA's rerankers say by a word of their own what is pooled."""
    known = {"avg": "mean", "cls": "cls", "last": "last"}
    return {"classifier_pooling": known[config.choice("pooling", known, "avg")]}


def _nomic(config: ConfigReader) -> Keys:
    """The first checkpoints have GPT-2's keys. Where rotations are scaled, they are so for texts
    beyond those of the training alone, and such texts are not read."""
    if "n_embd" not in config:
        return {}
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }
    gates = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu"}
    keys = {
        "intermediate_size": 4 * config.int("n_embd", ge=1),
        **called(config, names),
        "hidden_act": gates[config.choice("activation_function", gates, "gelu")],
    }
    if config.float("rotary_scaling_factor", None) is not None:
        longest = config.int("n_positions", 2048, ge=1)
        keys["max_position_embeddings"] = config.int("max_trained_positions", longest, le=longest)
    return keys


def _flash_roberta(config: ConfigReader) -> Keys:
    """Jina's XLM-RoBERTa, with rotations or with learned positions, has names of its own for
    tensors but not for itself."""
    named = config.list("architectures", of=str)[0]
    own = "use_flash_attn" in config or config.raw.get("position_embedding_type") == "rotary"
    if not own:
        return {}
    base = named.replace("XLMRobertaModel", "XLMRobertaForMaskedLM")  # all lies below a prefix
    return {
        "architectures": [base.replace("XLMRoberta", "JinaEmbeddingsV3")],
        **_rotary(config),
    }


def _rotary(config: ConfigReader) -> Keys:
    """Jina's name of the base; all that Jina ColBERT 2, its XLM-RoBERTa, has of its own."""
    return called(config, {"rotary_emb_base": "rope_theta"})


def _jina_bert(config: ConfigReader) -> Keys:
    """Only the place of its code tells whether queries and keys are normed."""
    places = config.raw.get("auto_map")
    stated = " ".join(map(str, places.values())) if isinstance(places, Mapping) else ""
    return {"qk_post_norm": QK_POST_NORM in stated}


def _neobert(config: ConfigReader) -> Keys:
    """Inner sizes are two thirds of what is stated, in whole multiples of 8."""
    names = {"NeoBERT": "NeoBERTModel", "NeoBERTLMHead": "NeoBERTForMaskedLM"}
    named = config.list("architectures", of=str)[0]
    inner = 2 * config.int("intermediate_size", ge=2) // 3
    return {
        "architectures": [names.get(named, named)],
        "intermediate_size": -(-inner // 8) * 8,
        **called(config, {"norm_eps": "layer_norm_eps", "max_length": "max_position_embeddings"}),
    }


def _ultrabert(config: ConfigReader) -> Keys:
    """The first checkpoints list a window and a base for each layer; 0: it sees all."""
    windows = config.list("attention_windows", None, of=int)
    if windows is None:
        return {}
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    keys: Keys = {"layer_types": kinds, "sliding_window": next(filter(None, windows), None)}
    bases = config.list("rope_theta", None, of=float, length=len(kinds))
    if bases is not None:
        keys["rope_parameters"] = {
            kind: {"rope_theta": base} for kind, base in zip(kinds, bases, strict=True)
        }
    return keys


ENCODER_KEYS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    "LlamaBidirectionalForSequenceClassification": bidirectional,
    "LlamaForClassification": _llama_classes,
    **{f"NomicBert{head}": _nomic for head in HEADS},
    **{f"XLMRoberta{head}": _flash_roberta for head in HEADS},
    **{f"JinaBert{head}": _jina_bert for head in HEADS},
    **{f"Ultrabert{head}": _ultrabert for head in HEADS},
    COLBERT: _rotary,
    "ColBERTJinaRobertaModel": _rotary,
    **dict.fromkeys(("NeoBERT", "NeoBERTLMHead", "NeoBERTForSequenceClassification"), _neobert),
}
"""By the name of the architecture."""
