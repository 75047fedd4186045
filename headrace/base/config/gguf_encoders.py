"""Rows of the table of GGUF architectures: encoders, and T5's encoder-decoders."""

from __future__ import annotations

from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import Config, GGUFArchitecture, count, need_int, rows_of
from headrace.base.errors import CheckpointError

POOLING: Final = {1: "mean", 2: "cls", 3: "last"}
"""Values of pooling_type that pool."""
JUDGING: Final = "cls.output.weight"
"""The last layer of a classifier."""
_BUCKETS: Final = 32


def gguf_pooling(file: GGUFFile) -> str | None:
    """How the vectors of a text's tokens become one, where the file says so; one that is unknown is
    refused by name."""
    key = f"{file.text('general.architecture')}.pooling_type"
    stated = file.whole(key)
    if stated is None or stated in (_NO_POOLING, _RANKS):
        return None
    if stated not in POOLING:
        raise file.wrong(key, "0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)")
    return POOLING[stated]


_NO_POOLING, _RANKS = 0, 4


def _judges(file: GGUFFile, name: str, config: Config) -> bool:
    """Whether the file holds a classifier, whose labels become part of the config."""
    if JUDGING not in file.tensors:
        return False
    labels = file.texts(f"{name}.classifier.output_labels")
    number = rows_of(file, JUDGING)
    if labels is None:
        labels = [f"LABEL_{index}" for index in range(number)]
    if len(labels) != number:
        raise file.wrong(f"{name}.classifier.output_labels", f"{number} names")
    config["id2label"] = {str(index): label for index, label in enumerate(labels)}
    return True


def _bert(file: GGUFFile, name: str, config: Config) -> None:
    """BERT, RoBERTa and their kin: the rows of positions that no text uses are left out. A
    classifier's first layer on the first token is what BERT calls its pooler."""
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    types = "token_types.weight"
    config["type_vocab_size"] = rows_of(file, types) if types in file.tensors else 0
    if not _judges(file, name, config):
        return
    if "cls.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.paths[0]}: tensor cls.weight is missing: a classifier without its pooler, "
            "which the converter left out; use the checkpoint it was made of"
        )
    config["architectures"] = ["BertForSequenceClassification"]


def _nomic(file: GGUFFile, name: str, config: Config) -> None:
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    config["type_vocab_size"] = rows_of(file, "token_types.weight")


def _jina(file: GGUFFile, name: str, config: Config) -> None:
    _nomic(file, name, config)
    config["separate_gate"] = "blk.0.ffn_gate.weight" in file.tensors


def _jina_v3(file: GGUFFile, name: str, config: Config) -> None:
    _nomic(file, name, config)
    config["rope_theta"] = file.number(f"{name}.rope.freq_base", 20_000.0)


def _neobert(file: GGUFFile, name: str, config: Config) -> None:
    """Inner sizes are stated as two thirds of the checkpoint's, of which the tensors have whole
    multiples of 8."""
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    config["intermediate_size"] = -(-config["intermediate_size"] // 8) * 8
    if _judges(file, name, config):
        config["architectures"] = ["NeoBERTForSequenceClassification"]


def _modern_bert(file: GGUFFile, name: str, config: Config) -> None:
    """Every so manieth layer sees all; the window counts both sides."""
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["hidden_activation"] = file.text(f"{name}.hidden_activation", "gelu")
    config["local_attention"] = need_int(file, f"{name}.attention.sliding_window")
    every = count(file, f"{name}.attention.sliding_window_pattern", 3)
    config["global_attn_every_n_layers"] = every
    config["global_rope_theta"] = config.pop("rope_theta")
    config["local_rope_theta"] = file.number(f"{name}.rope.freq_base_swa", 10000.0)
    if _judges(file, name, config):
        config["architectures"] = ["ModernBertForSequenceClassification"]


def _t5(file: GGUFFile, name: str, config: Config) -> None:
    """The tensors tell T5 (plain MLPs by relu, logits scaled) from 1.1 and later, and UMT5, whose
    layers each have position biases, from both."""
    stack = "enc" if name == "t5encoder" else "dec"
    gated = f"{stack}.blk.0.ffn_gate.weight" in file.tensors
    layers = config["num_hidden_layers"]
    each = layers > 1 and f"{stack}.blk.1.attn_rel_b.weight" in file.tensors
    tied = config["tie_word_embeddings"]
    for key, ours in (
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("d_model", "hidden_size"),
        ("d_kv", "head_dim"),
        ("d_ff", "intermediate_size"),
        ("layer_norm_epsilon", "rms_norm_eps"),
    ):
        config[key] = config.pop(ours)
    config["num_decoder_layers"] = count(file, f"{name}.decoder_block_count", layers)
    config["relative_attention_num_buckets"] = count(
        file, f"{name}.attention.relative_buckets_count", _BUCKETS
    )
    config["feed_forward_proj"] = "gated-gelu" if gated else "relu"
    config["scale_decoder_outputs"] = tied and not gated
    config["n_positions"] = config.pop("max_position_embeddings")
    if each:
        config["model_type"] = "umt5"
        kind = "UMT5EncoderModel" if stack == "enc" else "UMT5ForConditionalGeneration"
        config["architectures"] = [kind]
    if stack == "dec":
        config["decoder_start_token_id"] = count_from_zero(
            file, f"{name}.decoder_start_token_id", 0
        )
        config["is_encoder_decoder"] = True


def count_from_zero(file: GGUFFile, key: str, default: int) -> int:
    """A whole number of at least 0, or a default."""
    value = file.whole(key, default)
    if value is None or value < 0:
        raise file.wrong(key, "a whole number of at least 0")
    return value


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "bert": GGUFArchitecture(
        model_type="bert", architecture="BertModel", fixed={"hidden_act": "gelu"}, adjust=_bert
    ),
    "nomic-bert": GGUFArchitecture(
        model_type="nomic_bert",
        architecture="NomicBertModel",
        fixed={"hidden_act": "silu"},
        adjust=_nomic,
    ),
    "jina-bert-v2": GGUFArchitecture(
        model_type="bert",
        architecture="JinaBertModel",
        fixed={"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
        adjust=_jina,
    ),
    "jina-bert-v3": GGUFArchitecture(
        model_type="jina_embeddings_v3",
        architecture="JinaEmbeddingsV3Model",
        fixed={"hidden_act": "gelu", "pad_token_id": 1},
        adjust=_jina_v3,
    ),
    "neo-bert": GGUFArchitecture(
        model_type="neobert",
        architecture="NeoBERTModel",
        fixed={"hidden_act": "swiglu"},
        adjust=_neobert,
    ),
    "modern-bert": GGUFArchitecture(
        model_type="modernbert", architecture="ModernBertModel", adjust=_modern_bert
    ),
    "eurobert": GGUFArchitecture(
        model_type="eurobert", architecture="EuroBertModel", fixed={"hidden_act": "silu"}
    ),
    "t5": GGUFArchitecture(model_type="t5", architecture="T5ForConditionalGeneration", adjust=_t5),
    "t5encoder": GGUFArchitecture(model_type="t5", architecture="T5EncoderModel", adjust=_t5),
}
