"""Reranking by a generative model trained to judge pairs: it is asked, and its next word is yes or
no.

The score is sigmoid(logit of yes - logit of no) behind the prompt, which is the share of yes among
the two. The words are the checkpoint's (`classifier_from_token` in config.json: no, yes); the
question is the one that Qwen3-Reranker was trained on (its model card), put into the model's own
chat template."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.base.errors import InvalidRequest, RequestError
from headrace.base.wire.media import MediaInput
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.likelihood import Asked, Expected, Manner, expected
from headrace.front.server.conversation.media import media_request
from headrace.front.server.conversation.pooling import shortened
from headrace.front.server.pooling.schema import Parts, ScoringInput, Sent

TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Fields a web search query, retrieve relevant passages that answer the query"


async def judged(
    context: RequestContext, scoring_input: ScoringInput
) -> tuple[list[float], list[Expected]]:
    """One score per document: the probability of yes, or (not activated) the difference of the
    logits."""
    if scoring_input.truncate is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: would cut off what the model is asked; send "
            "max_tokens_per_doc",
            field="truncate_prompt_tokens",
        )
    words = _word_ids(context)
    asked = []
    for query, text in zip(scoring_input.paired_queries, scoring_input.documents, strict=True):
        if isinstance(query, Parts) or isinstance(text, Parts):
            ids, media = await _seen_prompt(context, scoring_input, query, text)
            asked.append(Asked(prompt_ids=ids, token_ids=words, media=media))
        else:
            ids = await _prompt(context, scoring_input, query, text)
            asked.append(Asked(prompt_ids=ids, token_ids=words))
    answers = await expected(context, asked, Manner(timeout_s=scoring_input.timeout_s))
    if scoring_input.activate:
        return [float(one.shares[1]) for one in answers], answers
    return [float(one.values[1] - one.values[0]) for one in answers], answers


def _word_ids(context: RequestContext) -> tuple[int, ...]:
    """The ids of no and yes."""
    judge = context.services.text.pooling.judge
    assert judge is not None, "only asked of a model that judges"
    word_ids = [context.services.tokenizer.encode_plain(word) for word in judge]
    if any(len(ids) != 1 for ids in word_ids):
        raise InvalidRequest(
            f"classifier_from_token {list(judge)}: each must be one token of the model's "
            "vocabulary",
            field="model",
        )
    return word_ids[0][0], word_ids[1][0]


async def _seen_prompt(
    context: RequestContext, scoring_input: ScoringInput, query: Sent, document: Sent
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """The question about a pair with images or video in it, as Qwen3-VL-Reranker was trained on it:
    the parts of each side behind its name."""
    services, field = context.services, scoring_input.fields[1]
    assert services.media is not None, "models that see alone have parts"
    content = [
        {"type": "text", "text": f"<Instruct>: {scoring_input.instruction or INSTRUCTION}"},
        {"type": "text", "text": "<Query>:"},
        *_parts_of(query),
        {"type": "text", "text": "\n<Document>:"},
        *_parts_of(document),
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": TASK},
        {"role": "user", "content": content},
    ]
    try:
        prepared = await services.media.prepare(messages, media_request(context))
        ids = await services.template.render_async(prepared.messages)
        ids, media = services.media.expand(ids, prepared.media, field=field)
    except RequestError as error:
        raise type(error)(error.message, field=field) from None
    return shortened(ids, None, most=services.text.max_model_len - 1, field=field), media


def _parts_of(sent: Sent) -> list[Any]:
    if isinstance(sent, Parts):
        return list(sent.parts)
    return [{"type": "text", "text": sent}]


async def _prompt(
    context: RequestContext, scoring_input: ScoringInput, query: str, text: str
) -> list[int]:
    services = context.services
    field = scoring_input.fields[1]
    if scoring_input.document_tokens is not None:
        ids = await asyncio.to_thread(services.tokenizer.encode_plain, text)
        text = services.tokenizer.decode(ids[: scoring_input.document_tokens])
    pair = f"<Instruct>: {scoring_input.instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {text}"
    messages = [{"role": "system", "content": TASK}, {"role": "user", "content": pair}]
    try:
        ids = await services.template.render_async(messages, kwargs={"enable_thinking": False})
    except RequestError as error:
        raise type(error)(error.message, field=field) from None
    return shortened(ids, None, most=services.text.max_model_len - 1, field=field)
