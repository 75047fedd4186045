"""Reranking by a model that reads all documents of a query in one prompt (Jina Reranker v3).

A token stands behind each document and one behind the query; documents score by the cosine of their
token's vector with the query's. The prompt, the lengths and the number of documents of a block are
those that the model was trained on (its model card). Documents of several blocks are compared with
one query: the mean of the blocks' own, each weighed by its block's best document."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from headrace.base.errors import EngineError, InvalidRequest
from headrace.front.client.pooling import Float32, PooledAnswer
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.pooling import PoolInput, PoolJob, pooled, shortened
from headrace.front.server.pooling.content import only_texts
from headrace.front.server.pooling.schema import ScoringInput
from headrace.front.text.threads import TEXT_THREADS
from headrace.front.text.tokenizer import Tokenizer

QUERY_TOKENS, DOCUMENT_TOKENS, BLOCK_DOCUMENTS = 512, 2048, 125
FRAME_TOKENS = 32
"""More than the tokens around one document."""
SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends "
    "on how well it answers the question. If not, try to analyze the intent of the query and "
    "assess how well each passage satisfies the intent. If an instruction is provided, you should "
    "follow the instruction when determining the ranking."
)
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class _Block(NamedTuple):
    """Documents of one prompt, whose vectors lie at `documents` and `query` among its tokens."""

    ids: list[int]
    documents: list[int]
    query: int


async def ranked(
    context: RequestContext, scoring_input: ScoringInput
) -> tuple[list[float], list[PooledAnswer]]:
    """One score per document, and what was pooled for them."""
    if scoring_input.truncate is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: would cut off documents of the list; send max_tokens_per_doc",
            field="truncate_prompt_tokens",
        )
    queries, documents = only_texts(scoring_input.queries), only_texts(scoring_input.documents)
    tokenizer, field = context.services.tokenizer, scoring_input.fields[1]
    for side, name in zip((queries, documents), scoring_input.fields, strict=True):
        for text in side:
            tokenizer.check_length(text, None, field=name)
    lists = [documents] if len(queries) == 1 else [[one] for one in documents]
    tokens = context.services.text.pooling.listwise
    assert tokens is not None, "only asked of a model that reads lists"
    maker = _Maker(
        tokenizer,
        tokens,
        instruction=scoring_input.instruction,
        document_tokens=scoring_input.document_tokens or DOCUMENT_TOKENS,
        longest=context.services.text.max_model_len,
    )
    blocks: list[list[_Block]] = []
    for query, texts in zip(queries, lists, strict=True):
        size = len(query) + sum(map(len, texts))
        blocks.append(await TEXT_THREADS.run(size, partial(maker.blocks, query, texts)))
    every = [block for one in blocks for block in one]
    most = context.services.text.max_model_len
    inputs = [PoolInput(ids=shortened(one.ids, None, most=most, field=field)) for one in every]
    job = PoolJob(how="tokens", timeout_s=scoring_input.timeout_s)
    answers = await pooled(context, inputs, job)
    scores, at = [], 0
    for one in blocks:
        vectors = [answer.values for answer in answers[at : at + len(one)]]
        scores += list_scores(one, vectors)
        at += len(one)
    return scores, answers


def list_scores(blocks: list[_Block], vectors: list[Float32]) -> list[float]:
    """The score of each document of one query, whose blocks have these vectors of their tokens."""
    queries = np.stack([rows[block.query] for block, rows in zip(blocks, vectors, strict=True)])
    documents = [rows[block.documents] for block, rows in zip(blocks, vectors, strict=True)]
    best = [
        (1.0 + _cosines(query, rows).max()) / 2.0
        for query, rows in zip(queries, documents, strict=True)
    ]
    weights = np.asarray(best) / max(float(np.sum(best)), 1e-12)
    return [float(one) for rows in documents for one in _cosines(weights @ queries, rows)]


def _cosines(query: Float32, rows: Float32) -> Float32:
    lengths = np.linalg.norm(query) * np.linalg.norm(rows, axis=1)
    scores: Float32 = rows @ query / np.maximum(lengths, 1e-12)
    return scores


class _Maker:
    """Texts to blocks. `tokens`: those behind a document and behind the query."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: tuple[str, str],
        *,
        instruction: str | None,
        document_tokens: int,
        longest: int,
    ) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        numbers = [tokenizer.token_id(token) for token in tokens]
        if None in numbers:
            raise InvalidRequest(
                f"the model's vocabulary has no token {tokens[numbers.index(None)]!r}, whose "
                "vector stands for a text",
                field="model",
            )
        self._numbers = numbers
        self._instruction, self._longest = instruction, longest
        self._document_tokens = document_tokens

    def blocks(self, query: str, documents: list[str]) -> list[_Block]:
        """The prompts of one query."""
        query, _ = self._cut(query, QUERY_TOKENS)
        empty = len(self._ids(query, []))
        blocks: list[_Block] = []
        held: list[str] = []
        left = self._longest - empty
        for document in documents:
            text, count = self._cut(document, self._document_tokens)
            count += FRAME_TOKENS
            if held and (len(held) == BLOCK_DOCUMENTS or count > left):
                blocks.append(self._block(query, held))
                held, left = [], self._longest - empty
            held.append(text)
            left -= count
        return [*blocks, self._block(query, held)]

    def _cut(self, text: str, most: int) -> tuple[str, int]:
        """A text of at most so many tokens, and their number."""
        ids = self._tokenizer.encode_plain(text)
        if len(ids) <= most:
            return text, len(ids)
        return self._tokenizer.decode(ids[:most]), most

    def _block(self, query: str, documents: list[str]) -> _Block:
        ids = self._ids(query, documents)
        at = np.asarray(ids)
        places, asked = (np.flatnonzero(at == number).tolist() for number in self._numbers)
        if len(places) != len(documents) or len(asked) != 1:
            raise EngineError("a prompt of documents has lost the tokens behind them")
        return _Block(ids=ids, documents=places, query=asked[0])

    def _ids(self, query: str, documents: list[str]) -> list[int]:
        guard = self._tokenizer.guard
        behind_document, behind_query = self._tokens
        asked = guard.protect(query)
        instructed = ""
        if self._instruction is not None:
            instructed = f"<instruct>\n{guard.protect(self._instruction)}\n</instruct>\n"
        passages = "\n".join(
            f'<passage id="{i}">\n{guard.protect(text)}{behind_document}\n</passage>'
            for i, text in enumerate(documents)
        )
        prompt = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
            f"I will provide you with {len(documents)} passages, each indicated by a numerical "
            f"identifier. Rank the passages based on their relevance to query: {asked}\n{instructed}"
            f"{passages}\n<query>\n{asked}{behind_query}\n</query>{BEHIND}"
        )
        return self._tokenizer.encode_guarded(prompt)
