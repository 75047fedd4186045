"""POST /v1/decisions and /v1/systemone: two dialects of questions over one way to ask
(asking.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.context import RequestContext, json_response
from headrace.front.server.conversation.likelihood import Expected, Manner
from headrace.front.server.conversation.resolved import TranslatedRequest
from headrace.front.server.decisions.asking import (
    Question,
    asked,
    confidence,
    parts_of,
    usage_of,
    words_of,
)
from headrace.front.server.decisions.schema import (
    DecisionChoice,
    DecisionsRequest,
    Json,
    NamedChoice,
    NamedScore,
    Noul,
    Predicate,
    Score,
    SystemOneRequest,
)
from headrace.front.server.http.limits import typed

ChatOf = Callable[[RequestContext, str | list[Json]], TranslatedRequest]
Handler = Callable[[RequestContext, Any], Awaitable[Response]]


def posting(chat_of: ChatOf) -> Handler:
    """The handler of /v1/decisions; `chat_of` reads its input, in another dialect's items."""

    async def post_decisions(context: RequestContext, document: Any) -> Response:
        """POST /v1/decisions: probabilities of predicates, choices and scores about an input."""
        return await _decided(context, document, chat_of)

    return post_decisions


async def _decided(context: RequestContext, document: Any, chat_of: ChatOf) -> Response:
    request = typed(document, DecisionsRequest)
    model = context.services.base_name(request.model)
    questions = [_question(one, f"questions[{i}]") for i, one in enumerate(request.questions)]
    chat = chat_of(context, _flat_items(request.input))
    answers = await asked(context, chat, questions, Manner(timeout_s=request.timeout_s))
    replies = [
        _answer(one, expected) for one, expected in zip(request.questions, answers, strict=True)
    ]
    return json_response({"model": model, "answers": replies, "usage": usage_of(answers)})


async def post_systemone(context: RequestContext, document: Any) -> Response:
    """POST /v1/systemone: the probabilities of named questions about a state."""
    request = typed(document, SystemOneRequest)
    model = context.services.base_name(request.model)
    state = words_of(request.state, "state")
    messages = [{"role": "user", "content": state}]
    chat = TranslatedRequest(
        document={"messages": messages}, places=["state"], names={"messages": "state"}
    )
    questions = [_named(one, f"questions.{name:.80}") for name, one in request.questions.items()]
    answers = await asked(context, chat, questions, Manner(timeout_s=request.timeout_s))
    replies = {
        name: _named_answer(one, expected)
        for (name, one), expected in zip(request.questions.items(), answers, strict=True)
    }
    return json_response({"model": model, "answers": replies, "usage": usage_of(answers)})


def _flat_items(items: str | list[Json]) -> str | list[Json]:
    """The input with its JSON parts as texts."""
    return items if isinstance(items, str) else [_flat(one, i) for i, one in enumerate(items)]


def _flat(item: Json, index: int) -> Json:
    if item.get("role") == "user" and isinstance(item.get("content"), list):
        return {**item, "content": parts_of(item["content"], f"input[{index}].content")}
    return item


def _instructions(value: str | list[Any], at: str) -> str:
    return value if isinstance(value, str) else parts_of(value, f"{at}.instructions")


def _question(one: Predicate | DecisionChoice | Score, at: str) -> Question:
    text = _instructions(one.instructions, at)
    match one:
        case Predicate():
            return Question(at=at, text=text, options=[("true", None), ("false", None)])
        case DecisionChoice():
            values = [(type(each.value), each.value) for each in one.choices]
            if len(set(values)) < len(values):
                raise InvalidRequest(f"{at}.choices: a value is given twice", field=f"{at}.choices")
            return Question(
                at=f"{at}.choices",
                text=text,
                options=[(_shown(each.value), each.description) for each in one.choices],
            )
        case Score():
            options = [(each.label, each.description) for each in one.levels]
            return Question(at=f"{at}.levels", text=text, options=options)


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _answer(one: Predicate | DecisionChoice | Score, expected: Expected) -> Json:
    shares = expected.shares.tolist()
    match one:
        case Predicate():
            return {"type": "predicate", "name": one.name, "probability": shares[0]}
        case DecisionChoice():
            chances = [
                {"value": each.value, "probability": share}
                for each, share in zip(one.choices, shares, strict=True)
            ]
            best = one.choices[shares.index(max(shares))].value
            document: Json = {"type": "choice", "choice": best, "probabilities": chances}
        case Score():
            chances = [
                {"value": i, "label": each.label, "probability": share}
                for i, (each, share) in enumerate(zip(one.levels, shares, strict=True))
            ]
            document = {"type": "score", "score": _mean(shares), "probabilities": chances}
    return {**document, "name": one.name, "confidence": confidence(shares)}


def _named(one: Noul | NamedChoice | NamedScore, at: str) -> Question:
    text = words_of(one.instructions, f"{at}.instructions")
    at = f"{at}.criteria"
    match one:
        case Noul():
            said = one.criteria or {}
            if set(said) - {"true", "false"}:
                raise InvalidRequest(f"{at}: allowed are true and false", field=at)
            options = [(side, _described(said.get(side), at)) for side in ("true", "false")]
        case NamedChoice():
            options = [(value, _described(each, at)) for value, each in one.criteria.items()]
        case NamedScore():
            options = [(words_of(each, f"{at}[{i}]"), None) for i, each in enumerate(one.criteria)]
    return Question(at=at, text=text, options=options)


def _described(value: Any, at: str) -> str | None:
    return None if value is None else words_of(value, at)


def _named_answer(one: Noul | NamedChoice | NamedScore, expected: Expected) -> Json:
    shares = expected.shares.tolist()
    match one:
        case Noul():
            return {"type": "noul", "noul": shares[0]}
        case NamedChoice():
            chances = dict(zip(one.criteria, shares, strict=True))
            best = max(chances, key=chances.__getitem__)
            document: Json = {"type": "choice", "choice": best, "probabilities": chances}
        case NamedScore():
            legend = {str(i): each for i, each in enumerate(one.criteria)}
            chances = {str(i): share for i, share in enumerate(shares)}
            document = {"type": "score", "score": _mean(shares), "legend": legend}
            document["probabilities"] = chances
    return {**document, "confidence": confidence(shares)}


def _mean(shares: list[float]) -> float:
    return sum(level * share for level, share in enumerate(shares))
