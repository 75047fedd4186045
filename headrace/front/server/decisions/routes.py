"""POST /v1/decisions and /v1/systemone: two dialects of questions over one way to ask (asking.py)."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation import Translated
from headrace.front.server.decisions.asking import (
    Question,
    asked,
    confidence,
    parts_of,
    usage_of,
    words_of,
)
from headrace.front.server.decisions.schema import (
    Choice,
    DecisionsRequest,
    Json,
    NamedChoice,
    NamedScore,
    Noul,
    Predicate,
    Score,
    SystemOneRequest,
)
from headrace.front.server.exchange import Exchange, json_response
from headrace.front.server.ids import response_id
from headrace.front.server.openai.schema import typed
from headrace.front.server.pooling.likelihood import Expected, Manner
from headrace.front.server.responses.conversation import to_request
from headrace.front.server.responses.items import with_ids
from headrace.front.server.responses.schema import InputRequest
from headrace.front.server.responses.tools import offered


async def post_decisions(exchange: Exchange, document: Any) -> Response:
    """POST /v1/decisions: the probabilities of predicates, choices and scores about an input."""
    request = typed(document, DecisionsRequest)
    model = exchange.services.model_name(request.model)
    questions = [_question(one, f"questions[{i}]") for i, one in enumerate(request.questions)]
    told = _told(exchange, request.input)
    answers = await asked(exchange, told, questions, Manner(timeout_s=request.timeout_s))
    made = [_answer(one, found) for one, found in zip(request.questions, answers, strict=True)]
    return json_response({"model": model, "answers": made, "usage": usage_of(answers)})


async def post_systemone(exchange: Exchange, document: Any) -> Response:
    """POST /v1/systemone: the probabilities of named questions about a state."""
    request = typed(document, SystemOneRequest)
    model = exchange.services.model_name(request.model)
    state = words_of(request.state, "state")
    messages = [{"role": "user", "content": state}]
    told = Translated(
        document={"messages": messages}, places=["state"], names={"messages": "state"}
    )
    questions = [_named(one, f"questions.{name:.80}") for name, one in request.questions.items()]
    answers = await asked(exchange, told, questions, Manner(timeout_s=request.timeout_s))
    made = {
        name: _named_answer(one, found)
        for (name, one), found in zip(request.questions.items(), answers, strict=True)
    }
    return json_response({"model": model, "answers": made, "usage": usage_of(answers)})


def _told(exchange: Exchange, given: str | list[Json]) -> Translated:
    """The input as a conversation; its JSON parts become texts."""
    items = given if isinstance(given, str) else [_flat(one, i) for i, one in enumerate(given)]
    return to_request(
        InputRequest(input=items),
        {},
        tools=offered(None),
        history=[],
        given=with_ids(items, response_id()),
        unseal=lambda sealed: None,
        max_model_len=exchange.services.text.max_model_len,
    )


def _flat(item: Json, index: int) -> Json:
    if item.get("role") == "user" and isinstance(item.get("content"), list):
        return {**item, "content": parts_of(item["content"], f"input[{index}].content")}
    return item


def _instructions(given: str | list[Any], at: str) -> str:
    return given if isinstance(given, str) else parts_of(given, f"{at}.instructions")


def _question(one: Predicate | Choice | Score, at: str) -> Question:
    text = _instructions(one.instructions, at)
    match one:
        case Predicate():
            return Question(at=at, text=text, options=[("true", None), ("false", None)])
        case Choice():
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


def _answer(one: Predicate | Choice | Score, found: Expected) -> Json:
    shares = found.shares.tolist()
    match one:
        case Predicate():
            return {"type": "predicate", "name": one.name, "probability": shares[0]}
        case Choice():
            chances = [
                {"value": each.value, "probability": share}
                for each, share in zip(one.choices, shares, strict=True)
            ]
            best = one.choices[shares.index(max(shares))].value
            made: Json = {"type": "choice", "choice": best, "probabilities": chances}
        case Score():
            chances = [
                {"value": i, "label": each.label, "probability": share}
                for i, (each, share) in enumerate(zip(one.levels, shares, strict=True))
            ]
            made = {"type": "score", "score": _mean(shares), "probabilities": chances}
    return {**made, "name": one.name, "confidence": confidence(shares)}


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


def _described(given: Any, at: str) -> str | None:
    return None if given is None else words_of(given, at)


def _named_answer(one: Noul | NamedChoice | NamedScore, found: Expected) -> Json:
    shares = found.shares.tolist()
    match one:
        case Noul():
            return {"type": "noul", "noul": shares[0]}
        case NamedChoice():
            chances = dict(zip(one.criteria, shares, strict=True))
            best = max(chances, key=chances.__getitem__)
            made: Json = {"type": "choice", "choice": best, "probabilities": chances}
        case NamedScore():
            legend = {str(i): each for i, each in enumerate(one.criteria)}
            chances = {str(i): share for i, share in enumerate(shares)}
            made = {"type": "score", "score": _mean(shares), "legend": legend}
            made["probabilities"] = chances
    return {**made, "confidence": confidence(shares)}


def _mean(shares: list[float]) -> float:
    return sum(level * share for level, share in enumerate(shares))
