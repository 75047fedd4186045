"""What pooled answers are made of: the dense modules behind the layers, late interaction, and how a
text becomes one vector."""

from __future__ import annotations

import msgspec


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One dense module behind the encoder: its folder below the checkpoint, the name of its tensors
    there, and its sizes. `of`: what it is applied to, see Projection."""

    path: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"
    name: str = "linear"
    of: str = "pooled"


class LateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and documents become tokens for late interaction (ColBERT): a prefix token behind
    the first one, a greatest length; queries filled up with mask tokens (`expands`), documents
    without the tokens of `skipped`.

    Of models that see: `query_form`, what a query becomes, and `image_form`, the text around an
    image; {} stands for a query, a placeholder for an image. `adds_special`: both get the
    tokenizer's own tokens too."""

    query_prefix: str = ""
    document_prefix: str = ""
    query_tokens: int = 32
    document_tokens: int = 300
    expands: bool = False
    skipped: tuple[str, ...] = ()
    query_form: str = ""
    image_form: str = ""
    adds_special: bool = False


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What pooled answers of this model are made of, from sentence-transformers' files and
    config.json.

    `image_form`: the text around an image that is embedded, where no chat template makes it.
    `padded`: a text is filled up to so many tokens, with this one; (0, 0): it is not.
    `pair`: what stands before the query and before the document of a pair that is judged; None:
    they are encoded as the tokenizer says.
    `listwise`: the tokens behind a document and the query where all are in one prompt. `ends`: the
    ids around a text, of which the first has no vector of its own and neither has a weight.
    `how` and `normalize` are the defaults of embeddings. `labels` name the logits of the
    classification head, empty without one; `head` says per what they are ("sequence", "token"),
    `activation` what makes them scores: sigmoid, softmax or none. `matryoshka`: lengths an
    embedding may be cut to, empty for any, None for no cutting. `late`: the model has a vector per
    token (`how` is "tokens") and compares them one by one. `judge`: the model generates, and was
    trained to say these words (no, yes) of a pair. `projected`: dense layers follow the pooling.
    `leads`: the tokens that end the part of a text that has no share in its mean, in each of the
    ways in which they are written. `media_alone`: nothing reads texts (--mm-encoder-only).
    """

    how: str = "last"
    normalize: bool = True
    head: str = "none"
    labels: tuple[str, ...] = ()
    activation: str = "none"
    matryoshka: tuple[int, ...] | None = None
    late: LateSpec | None = None
    judge: tuple[str, str] | None = None
    projected: bool = False
    image_form: str = ""
    padded: tuple[int, int] = (0, 0)
    listwise: tuple[str, str] | None = None
    ends: tuple[int, int] | None = None
    pair: tuple[str, str] | None = None
    leads: tuple[tuple[str, ...], ...] = ()
    media_alone: bool = False
