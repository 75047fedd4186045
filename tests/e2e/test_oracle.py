"""The whole engine against transformers: scores of every prompt token, through sockets, scheduler, chunks and cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
TEXTS = [
    "Once upon a time there was a fox who lived by the river.",
    "What is 17 + 25? The answer is 42, and that is all there is to say about it.",
    "one two three four five six seven eight nine ten " * 12,
    "x",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), dtype="float32", max_step_tokens=32, max_running=8, kv_blocks=256) as made:
        yield made


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def expected_scores(oracle: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_prompt_scores_equal_transformers_in_mixed_chunks(
    llm: LLM, oracle: torch.nn.Module
) -> None:
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0))
    for output in outputs:
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        ours = torch.tensor([s.token.logprob for s in output.prompt_logprobs[1:] if s is not None])
        wanted = expected_scores(oracle, output.prompt_ids)
        assert ours.shape == wanted.shape
        torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=0)


def test_greedy_tokens_equal_transformers_where_they_are_not_ties(
    llm: LLM, oracle: torch.nn.Module
) -> None:
    output = llm.generate(
        [TEXTS[0]], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    )[0]
    ids = output.prompt_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0]
    for position in range(len(output.prompt_ids) - 1, len(ids) - 1):
        best = logits[position].max()
        assert best - logits[position, ids[position + 1]] < 1e-3


def test_scores_of_a_cached_prefix_are_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    first, again = (llm.generate([TEXTS[2]], params)[0].outputs[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.logprobs is not None and again.logprobs is not None
    for one, other in zip(first.logprobs, again.logprobs, strict=True):
        assert abs(one.token.logprob - other.token.logprob) < 1e-4
