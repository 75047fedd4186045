"""Questions answered by probabilities: OpenAI's client for /v1/decisions, the plain protocol for /v1/systemone, both
against the whole vocabulary of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.api.clients import openai_client
from tests.api.serving import Served

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
STATE = "The order arrived broken, and nobody answers the phone."
CLOSING = "Answer with the letter of one option and nothing else."


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[openai.OpenAI]:
    with openai_client(demo.url) as found:
        yield found


def shares(
    demo: Served, oracle: torch.nn.Module, question: str, options: list[str], state: str = STATE
) -> np.ndarray:
    """The softmax over the letters of the options behind the rendered prompt."""
    letters = "ABCDEFGH"[: len(options)]
    lines = [f"{letter}) {option}" for letter, option in zip(letters, options, strict=True)]
    content = [
        {"type": "text", "text": state},
        {"type": "text", "text": "\n" + "\n".join([question, "", *lines, "", CLOSING])},
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    ids = demo.post("/v1/chat/completions/render", body).json()["token_ids"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokens = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in letters]
    with torch.inference_mode():
        found = oracle(torch.tensor([ids])).logits[0, -1][tokens].softmax(-1)
    return found.numpy()


def test_decisions_through_the_openai_client(
    client: openai.OpenAI, demo: Served, oracle: torch.nn.Module
) -> None:
    questions: Any = [
        {"type": "predicate", "name": "angry", "instructions": "The customer is angry."},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "Which team?"}],
            "choices": [{"value": "sales"}, {"value": "support", "description": "help"}, {"value": True}],
        },
        {
            "type": "score",
            "name": "urgency",
            "instructions": "How urgent?",
            "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high", "description": "now"}],
        },
    ]  # fmt: skip
    made = client.decisions.create(model="demo", input=STATE, questions=questions)
    predicate, choice, score = made.answers
    wanted = shares(demo, oracle, "The customer is angry.", ["true", "false"])
    assert predicate.type == "predicate" and predicate.name == "angry"
    assert predicate.probability == pytest.approx(wanted[0], abs=1e-4)
    wanted = shares(demo, oracle, "Which team?", ["sales", "support: help", "true"])
    assert choice.type == "choice" and choice.name is None
    assert [one.probability for one in choice.probabilities] == pytest.approx(wanted, abs=1e-4)
    assert [one.value for one in choice.probabilities] == ["sales", "support", True]
    assert choice.choice == ["sales", "support", True][int(wanted.argmax())]
    assert choice.confidence == pytest.approx((3 * wanted.max() - 1) / 2, abs=1e-3)
    wanted = shares(demo, oracle, "How urgent?", ["low", "middle", "high: now"])
    assert score.type == "score" and score.name == "urgency"
    assert score.score == pytest.approx(wanted @ [0, 1, 2], abs=1e-3)
    assert [(one.value, one.label) for one in score.probabilities] == [
        *((0, "low"), (1, "middle"), (2, "high")),
    ]
    used = made.usage
    assert used.total_tokens == used.input_tokens > 60 and used.output_tokens == 0
    assert demo.at_rest()


def test_systemone_answers_by_name(demo: Served, oracle: torch.nn.Module) -> None:
    questions = {
        "angry": {"type": "noul", "instructions": "Angry?", "criteria": {"true": "yes, very"}},
        "team": {"type": "choice", "instructions": "Which team?", "criteria": {"sales": None, "support": "help"}},
        "urgency": {"type": "score", "instructions": {"ask": "How urgent?"}, "criteria": ["low", "high"]},
    }  # fmt: skip
    state = {"order": 7, "text": "broken"}
    answer = demo.post("/v1/systemone", {"model": "demo", "state": state, "questions": questions})
    assert answer.status_code == 200, answer.text
    answers = answer.json()["answers"]
    shown = '{"order":7,"text":"broken"}'
    wanted = shares(demo, oracle, "Angry?", ["true: yes, very", "false"], shown)
    assert answers["angry"]["noul"] == pytest.approx(wanted[0], abs=1e-4)
    wanted = shares(demo, oracle, "Which team?", ["sales", "support: help"], shown)
    assert list(answers["team"]["probabilities"]) == ["sales", "support"]
    assert list(answers["team"]["probabilities"].values()) == pytest.approx(wanted, abs=1e-4)
    assert answers["team"]["choice"] == ["sales", "support"][int(wanted.argmax())]
    wanted = shares(demo, oracle, '{"ask":"How urgent?"}', ["low", "high"], shown)
    assert answers["urgency"]["score"] == pytest.approx(wanted[1], abs=1e-4)
    assert answers["urgency"]["legend"] == {"0": "low", "1": "high"}
    assert answer.json()["usage"]["output_tokens"] == 0


def test_the_input_may_be_a_conversation_with_json(client: openai.OpenAI) -> None:
    asked: Any = [{"type": "predicate", "instructions": "It is about a mill."}]
    said: Any = [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}]},
        {"role": "assistant", "content": "I see."},
    ]
    made = client.decisions.create(model="demo", input=said, questions=asked)
    assert 0 < made.answers[0].probability < 1


ONE: dict[str, Any] = {"type": "predicate", "instructions": "x"}
IMAGE = {"type": "input_image", "image_url": "x"}
LONG = "mill " * 9000


def about(question: dict[str, Any]) -> dict[str, Any]:
    return {"input": "a", "questions": [{"instructions": "x", **question}]}


def named(question: dict[str, Any]) -> dict[str, Any]:
    return {"state": "a", "questions": {"b": {"instructions": "x", **question}}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/decisions", {"input": "a", "questions": []}, "questions"),
        ("/v1/decisions", {"input": "a", "questions": [ONE] * 401}, "questions"),
        ("/v1/decisions", {"questions": [ONE]}, "input"),
        ("/v1/decisions", about({"type": "guess"}), "questions[0]"),
        ("/v1/decisions", about({"type": "choice", "choices": [{"value": "a"}]}), "questions[0].choices"),
        ("/v1/decisions", about({"type": "choice", "choices": [{"value": "a"}] * 2}), "questions[0].choices"),
        ("/v1/decisions", about({"type": "score", "levels": []}), "questions[0].levels"),
        ("/v1/decisions", about({**ONE, "instructions": [IMAGE]}), "questions[0].instructions[0].type"),
        ("/v1/decisions", {"input": [{"role": "user", "content": [IMAGE]}], "questions": [ONE]},
         "input[0].content[0].type"),
        ("/v1/decisions", {"input": LONG, "questions": [ONE]}, "input"),
        ("/v1/systemone", {"questions": {"a": {"type": "noul", "instructions": "x"}}}, "state"),
        ("/v1/systemone", {**named({"type": "noul"}), "state": 5}, "state"),
        ("/v1/systemone", {**named({"type": "noul"}), "state": LONG}, "state"),
        ("/v1/systemone", named({"type": "noul", "criteria": {"maybe": "y"}}), "questions.b.criteria"),
        ("/v1/systemone", named({"type": "choice", "criteria": {"b": None}}), "questions"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_named(
    path: str, body: dict[str, object], field: str, demo: Served
) -> None:
    answer = demo.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field), answer.text
    assert demo.at_rest()


def test_more_options_than_letters_and_than_one_step_names(demo: Served) -> None:
    """Options beyond the 26 letters are words of two; a step names at most 128 tokens, so this takes two."""
    many = [{"value": f"option {number}"} for number in range(255)]
    question = {"type": "choice", "instructions": "Which?", "choices": many}
    answer = demo.post("/v1/decisions", {"input": STATE, "questions": [question]})
    if answer.status_code == 400:
        assert "vocabulary has words for" in answer.json()["error"]["message"]
        question["choices"] = many[: int(answer.json()["error"]["message"].rpartition(" ")[2])]
        answer = demo.post("/v1/decisions", {"input": STATE, "questions": [question]})
    (found,) = answer.json()["answers"]
    assert sum(one["probability"] for one in found["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert len(found["probabilities"]) > 52
