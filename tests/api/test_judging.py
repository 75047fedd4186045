"""Shapes of queries and documents (MUL-08, REG-093), reranking by a model that says yes or no, and more texts than the
queue has room for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace.front.server.pooling.judge import INSTRUCTION, TASK
from tests.api.serving import Served, serving

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
QUERY = "What is the weather in Paris?"
DOCUMENTS = ["It is sunny in Paris.", "17 + 25 is 42.", "A mill has a wheel."]
WORDS = ("B", "A")  # the bundled vocabulary has no word for no
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": QUERY}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model, as if it had been trained to judge."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("judge") / "model")
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "classifier_from_token": list(WORDS)})
    )
    options = ("--threads", "1", "--dtype", "float32", "--max-running", "4")
    with serving(None, str(folder), *options, "--max-queued-requests", "1") as served:
        yield served


def logits_of_words(served: Served, query: str, text: str, instruction: str) -> tuple[float, float]:
    """The logits of no and yes out of the whole vocabulary, by transformers."""
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
    body = {
        "messages": [{"role": "system", "content": TASK}, {"role": "user", "content": pair}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    ids = served.post("/v1/chat/completions/render", body).json()["token_ids"]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    words = [tokenizer.encode(word, add_special_tokens=False) for word in WORDS]
    assert all(len(word) == 1 for word in words)
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0, -1]
    return float(logits[words[0][0]]), float(logits[words[1][0]])


@pytest.mark.parametrize("instruction", [None, "Find the city."])
def test_a_judge_scores_by_the_logits_of_yes_and_no(instruction: str | None, judge: Served) -> None:
    """MUL-08: as the two logits of the whole head; use_activation false gives their difference."""
    body = {"query": QUERY, "documents": DOCUMENTS, "instruction": instruction}
    ranked = judge.post("/rerank", body).json()["results"]
    plain = judge.post("/rerank", {**body, "use_activation": False}).json()["results"]
    assert [one["relevance_score"] for one in ranked] == sorted(
        (one["relevance_score"] for one in ranked), reverse=True
    )
    assert [one["index"] for one in ranked] == [one["index"] for one in plain]
    for one, raw in zip(ranked, plain, strict=True):
        text = DOCUMENTS[one["index"]]
        no, yes = logits_of_words(judge, QUERY, text, instruction or INSTRUCTION)
        assert raw["relevance_score"] == pytest.approx(yes - no, abs=2e-3)
        assert one["relevance_score"] == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-3)
    pairs = {"text_1": [QUERY] * 3, "text_2": DOCUMENTS, "instruction": instruction}
    scores = [d["score"] for d in judge.post("/score", pairs).json()["data"]]
    assert scores == pytest.approx(
        [one["relevance_score"] for one in sorted(ranked, key=lambda one: one["index"])], abs=1e-4
    )


def test_a_judge_reads_as_much_of_a_document_as_it_is_told_to(judge: Served) -> None:
    body = {"query": QUERY, "documents": [DOCUMENTS[0]]}
    whole = judge.post("/rerank", body).json()["usage"]["prompt_tokens"]
    cut = judge.post("/rerank", {**body, "max_tokens_per_doc": 2}).json()["usage"]["prompt_tokens"]
    assert cut < whole
    refused = judge.post("/rerank", {**body, "truncate_prompt_tokens": 8})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
    long = judge.post("/rerank", {**body, "documents": ["the mill " * 9000]})
    assert long.status_code == 400 and long.json()["error"]["param"] == "documents"


@pytest.mark.parametrize("side", ["query", "document", "both"])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_objects_and_parts_are_texts_on_both_sides(side: str, path: str, demo: Served) -> None:
    """REG-093: whatever a document may be, the query may be too."""
    shapes: list[object] = [{"text": QUERY}, {"content": QUERY}, {"content": [TEXT]}, {"content": [QUERY]}]  # fmt: skip
    plain = demo.post(path, {"query": QUERY, "documents": [QUERY, *DOCUMENTS]}).json()
    for shape in shapes:
        query = shape if side != "document" else QUERY
        document = shape if side != "query" else QUERY
        body = {"query": query, "documents": [document, *DOCUMENTS]}
        answer = demo.post(path, body).json()
        assert answer["results"] == plain["results"]
        assert answer["results"][0]["document"] == {"text": QUERY}
    scores = demo.post("/score", {"data_1": {"content": [TEXT]}, "data_2": shapes}).json()
    assert [one["score"] for one in scores["data"]] == pytest.approx([1.0] * 4, abs=1e-4)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"content": [TEXT, IMAGE]}, ".content[1].type"),
        ({"content": [IMAGE]}, ".content[0].type"),
        ({"content": [{"type": "video_url", "video_url": {"url": "x"}}]}, ".content[0].type"),
        ({"content": [{"type": "text"}]}, ".content[0].text"),
        ({"content": [5]}, ".content[0].type"),
        ({"image": "https://example.com/a.png"}, ".image"),
        ({"text": "a", "content": "b"}, ""),
        ({}, ""),
    ],
)
def test_a_medium_that_the_model_does_not_take_is_named_by_its_place(
    given: dict[str, object], where: str, demo: Served, judge: Served
) -> None:
    """MUL-08, REG-093: mixed image and text objects, in the query and among the documents."""
    bodies = [
        ("/rerank", {"query": given, "documents": DOCUMENTS}, "query"),
        ("/v2/rerank", {"query": QUERY, "documents": [QUERY, given]}, "documents[1]"),
        ("/score", {"text_1": given, "text_2": DOCUMENTS}, "text_1"),
        ("/score", {"data_1": QUERY, "data_2": [given]}, "data_2[0]"),
    ]
    for served in (demo, judge):
        for path, body, field in bodies:
            answer = served.post(path, body)
            assert answer.status_code == 400, (path, answer.text)
            error = answer.json()["error"]
            assert error["param"] == field + where and error["message"].startswith(field + where)
        assert served.at_rest()


def test_an_instruction_needs_a_model_that_follows_it(demo: Served) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "instruction": "Find the city."}
    refused = demo.post("/rerank", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "instruction"


def test_one_request_of_many_texts_is_admitted_as_a_whole(judge: Served) -> None:
    """Four run and one waits: forty texts of one request are not refused for the room that they take themselves."""
    texts = [f"{number} is a number" for number in range(40)]
    answer = judge.post("/rerank", {"query": QUERY, "documents": texts})
    assert answer.status_code == 200, answer.text
    assert sorted(one["index"] for one in answer.json()["results"]) == list(range(40))
    vectors = judge.post("/v1/embeddings", {"input": texts})
    assert vectors.status_code == 200 and len(vectors.json()["data"]) == 40
    assert judge.at_rest()
