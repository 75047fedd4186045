"""POST /generative_scoring: the probability of the first label as the token after query and
item."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.responses import Response

from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.likelihood import Asked, Manner, expected
from headrace.front.server.conversation.pooling import listed, shortened, tokenized
from headrace.front.server.conversation.request import parse
from headrace.front.server.pooling.schema import GenerativeScoringRequest


async def post_generative_scoring(context: RequestContext, document: Any) -> Response:
    """POST /generative_scoring: p(first label) as the token after query and item."""
    request = parse(document, GenerativeScoringRequest)
    services = context.services
    model = services.base_name(request.model)
    services.tokenizer.check_ids(request.label_token_ids, field="label_token_ids")
    context.hold_place()
    labels = tuple(request.label_token_ids)
    asked = [
        Asked(prompt_ids=ids, token_ids=labels) for ids in await _judged_prompts(context, request)
    ]
    manner = Manner(
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout_s,
    )
    answers = await expected(context, asked, manner)
    scores = [
        float(one.shares[0] if request.apply_softmax else np.exp(one.values[0])) for one in answers
    ]
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    num = sum(one.num_prompt for one in answers)
    used = {
        "prompt_tokens": num,
        "total_tokens": num + len(answers),
        "completion_tokens": len(answers),
    }
    return json_response(listed(context, model, data, used, kind="score"))


async def _judged_prompts(
    context: RequestContext, request: GenerativeScoringRequest
) -> list[list[int]]:
    """Query and item one after the other; special tokens once, at the front."""
    services = context.services
    first_special = request.add_special_tokens

    async def ids_of(prompt: str | list[int], *, special: bool, field: str) -> list[int]:
        if isinstance(prompt, str):
            return await tokenized(context, prompt, field=field, special=special)
        services.tokenizer.check_ids(prompt, field=field)
        return prompt

    prompts = []
    for item in request.items:
        front, back = (item, request.query) if request.item_first else (request.query, item)
        ids = [
            *await ids_of(front, special=first_special, field="query"),
            *await ids_of(back, special=False, field="items"),
        ]
        most = services.text.max_model_len - 1
        prompts.append(shortened(ids, None, most=most, field="items"))
    return prompts
