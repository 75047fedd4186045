"""Requests of the pooling routes: fields, types and bounds. Unknown fields are ignored; what would
need a medium this model does not take is refused by its place and type (content.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.front.server.conversation.pooling import MAX_TEXTS
from headrace.front.server.http.limits import Keywords, Name, TokenId
from headrace.front.server.pooling.vectors import NumberType


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a message with media among them, and where they stood in the request."""

    parts: tuple[Any, ...]
    field: str


Sent = str | Parts


class ScoringInput(msgspec.Struct, frozen=True, kw_only=True):
    """What /score and /rerank hand to a scorer. `documents` pair with `queries` one to one; one
    query goes with all."""

    queries: list[Sent]
    documents: list[Sent]
    activate: bool
    late: bool
    truncate: int | None
    document_tokens: int | None = None
    instruction: str | None = None
    timeout_s: float | None = None
    fields: tuple[str, str] = ("query", "documents")

    @property
    def paired_queries(self) -> list[Sent]:
        """A query for each document."""
        if len(self.queries) == 1:
            return self.queries * len(self.documents)
        return self.queries


Ids = Annotated[list[TokenId], Meta(min_length=1)]


Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


Truncate = Annotated[int, Meta(ge=-1, lt=2**31)]


Top = Annotated[int, Meta(ge=0, lt=2**31)]


Encoding = Literal["float", "base64", "bytes", "bytes_only"]


MAX_PARTS = 1024


class PoolingCommon(msgspec.Struct, frozen=True, kw_only=True):
    """What all pooling requests may carry."""

    model: Name | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    truncate_prompt_tokens: Truncate | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] | None = None


class PoolingContent(msgspec.Struct, frozen=True, kw_only=True):
    """A query or document as an object: exactly one of `text`, `content` (a text or the parts of a
    chat message: text, image_url, video_url ...) and `image` (a URL)."""

    text: str | None = None
    content: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_PARTS)] | None = None
    image: str | None = None


Inputs = (
    str
    | PoolingContent
    | Annotated[list[str | TokenId | Ids | PoolingContent], Meta(min_length=1, max_length=2**22)]
)


class TextRequest(PoolingCommon, frozen=True, kw_only=True):
    """Texts, lists of ids, objects with an image, or conversations (one, or a list of them).
    `embed_dtype` and `endianness` (native: little) are of base64 and bytes.
    `add_special_tokens`: texts get them by default, conversations what the template wrote.
    `padding`: max_length fills each up with padding tokens, which the model sees; what the others
    would add is masked for it, so nothing is added."""

    input: Inputs | None = None
    messages: (
        Annotated[
            list[
                dict[str, Any]
                | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
            ],
            Meta(min_length=1, max_length=4096),
        ]
        | None
    ) = None
    chat_template: Annotated[str, Meta(max_length=65536)] | None = None
    chat_template_kwargs: Keywords | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] = "right"
    padding: bool | Literal["longest", "max_length", "do_not_pad"] = False
    encoding_format: Encoding = "float"
    embed_dtype: NumberType = "float32"
    endianness: Literal["native", "little", "big"] = "native"


class EmbeddingRequest(TextRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings. `normalize` is also called `use_activation`. `late_chunking`: the texts
    are parts of one, computed together."""

    late_chunking: bool = False
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class PoolingRequest(TextRequest, frozen=True, kw_only=True):
    """POST /pooling. `pooling`: cls, last, mean, all (every token) or step (tokens with id
    `step_tag_id`)."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    pooling: str | None = None
    step_tag_id: TokenId | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class ClassifyRequest(TextRequest, frozen=True, kw_only=True):
    """POST /classify."""

    use_activation: bool | None = None


class CohereEmbedRequest(PoolingCommon, frozen=True, kw_only=True):
    """POST /v2/embed: one of `texts`, `inputs` (texts as parts) and `images`. `truncate` START
    drops the beginning."""

    texts: Texts | None = None
    inputs: Annotated[list[PoolingContent], Meta(min_length=1, max_length=MAX_TEXTS)] | None = None
    images: list[str] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    input_type: Annotated[str, Meta(max_length=64)] | None = None
    embedding_types: (
        Annotated[
            list[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]],
            Meta(min_length=1, max_length=6),
        ]
        | None
    ) = None
    output_dimension: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"


One = str | PoolingContent


Many = Annotated[list[One], Meta(min_length=1, max_length=MAX_TEXTS)]


Instruction = Annotated[str, Meta(max_length=2**20)]


class ScoreRequest(PoolingCommon, frozen=True, kw_only=True):
    """POST /score: 1:1, 1:N or N:N. Each side has several names; `late_interaction` scores by token
    vectors (MaxSim), `instruction` tells a model that judges what makes a document fit."""

    text_1: One | Many | None = None
    text_2: One | Many | None = None
    queries: One | Many | None = None
    documents: One | Many | None = None
    items: One | Many | None = None
    data_1: One | Many | None = None
    data_2: One | Many | None = None
    instruction: Instruction | None = None
    use_activation: bool | None = None
    late_interaction: bool = False


class RerankRequest(PoolingCommon, frozen=True, kw_only=True):
    """POST /rerank, /v1/rerank, /v2/rerank. `top_n` 0 or absent: all."""

    query: One
    documents: Many
    instruction: Instruction | None = None
    top_n: Top | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    return_documents: bool = True
    use_activation: bool | None = None
    late_interaction: bool = False


class GenerativeScoringRequest(PoolingCommon, frozen=True, kw_only=True):
    """POST /generative_scoring: the probability of the first label as the next token, per item."""

    query: str | Ids
    items: Annotated[list[str | Ids], Meta(min_length=1, max_length=MAX_TEXTS)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=128)]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
