"""What a checkpoint says about pooling: its modules (pooling_modules.py), and the labels and
problem type of a classifier's config.json."""

from __future__ import annotations

import msgspec

from headrace.back.models.pooling_families import PAIRS
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_encoders import gguf_pooling
from headrace.base.config.hf import ConfigReader
from headrace.base.config.pooling import PoolingSpec
from headrace.launch.pooling_modules import Modules

MAX_LABELS = 65_536
REWARD_MODEL = "ForRewardModel"
WEIGHT = "weight"
"""What the one number is called that tokens have of a model that weighs them."""


def labels_of(config: ConfigReader) -> tuple[str, ...]:
    """The names of a classifier's logits, in order: `id2label`, else LABEL_0 .. for `num_labels` (2
    if unsaid)."""
    id2label = config.raw.get("id2label")
    if id2label is None:
        count = config.int("num_labels", 2, ge=1, le=MAX_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    names = {str(key): str(value) for key, value in id2label.items()} if _is_map(id2label) else {}
    expected = [str(i) for i in range(len(names))]
    if not 0 < len(names) <= MAX_LABELS or sorted(names) != sorted(expected):
        raise config.wrong("id2label", f"names for 0 .. at most {MAX_LABELS - 1}, without gaps")
    return tuple(names[key] for key in expected)


def read_pooling(
    modules: Modules | None,
    config: ConfigReader,
    head: str,
    labels: tuple[str, ...],
    *,
    encodes: bool,
    whole: ConfigReader,
) -> PoolingSpec:
    """`config`: of the text part of `whole`. Decoders pool their last token and encoders their
    mean, unless the checkpoint says otherwise; classifiers by the token they were trained on."""
    activation = _activation(config, head, labels)
    if head == "sequence":
        how = _judged(config) if encodes else "last"
        named = config.list("architectures", ("",), of=str)[0]
        pair = PAIRS.get(named)
        return PoolingSpec(how=how, head=head, labels=labels, activation=activation, pair=pair)
    stated = modules or Modules(how="mean" if encodes else "last", normalize=True)
    return PoolingSpec(
        how=stated.how,
        normalize=stated.normalize,
        late=stated.late,
        head="none" if head == "words" else head,
        labels=labels if stated.ends is None else (WEIGHT,),
        activation=activation if stated.ends is None else "none",
        matryoshka=_matryoshka(config),
        projected=any(one.of in ("pooled", "every") for one in stated.dense),
        image_form=stated.image_form,
        padded=stated.padded,
        listwise=stated.listwise,
        ends=stated.ends,
        leads=stated.leads,
        judge=None if encodes or head in ("sequence", "token") else _judge(whole),
    )


def as_filed(pooling: PoolingSpec, file: GGUFFile) -> PoolingSpec:
    """As a GGUF file says that its model pools."""
    how = gguf_pooling(file)
    if how is None or pooling.head not in ("none", "lm"):
        return pooling
    return msgspec.structs.replace(pooling, how=how)


def _judged(config: ConfigReader) -> str:
    """What an encoder's classifier reads; EuroBERT calls the first token "bos". With a decoder
    behind it that is the last state."""
    behind = config.bool("is_encoder_decoder", False) or config.raw.get("summary_type") == "last"
    default = "last" if behind else "cls"
    stated = config.choice("classifier_pooling", ("cls", "mean", "bos", "last"), default)
    return "cls" if stated == "bos" else stated


def _judge(config: ConfigReader) -> tuple[str, str] | None:
    """The words of a generative reranker: for "does not fit" and for "fits"."""
    words = config.list("classifier_from_token", None, of=str, length=2)
    return None if words is None else (words[0], words[1])


def _matryoshka(config: ConfigReader) -> tuple[int, ...] | None:
    """The lengths listed, or any where the config only says that shorter ones were trained."""
    listed = config.list("matryoshka_dimensions", None, of=int)
    if listed is not None:
        return listed
    return () if config.bool("is_matryoshka", False) else None


def _activation(config: ConfigReader, head: str, labels: tuple[str, ...]) -> str:
    """Sigmoid for one label or several that may hold at once, softmax for one of several, none for
    a regression of several values, and for rewards. One label is a score, which rerankers read as a
    logit."""
    if head not in ("sequence", "token") or _rewards(config):
        return "none"
    kinds = ("regression", "single_label_classification", "multi_label_classification")
    named = config.choice("problem_type", kinds, None) if config.raw.get("problem_type") else None
    if len(labels) == 1 or named == "multi_label_classification":
        return "sigmoid"
    return "none" if named == "regression" else "softmax"


def _rewards(config: ConfigReader) -> bool:
    """Whether its one label is a reward, of no bounds."""
    named = config.list("architectures", (), of=str)
    return bool(named) and named[0].endswith(REWARD_MODEL)


def _is_map(value: object) -> bool:
    return isinstance(value, dict)
