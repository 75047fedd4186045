"""The bundled model with `--quantization fp8` against transformers with the same numbers, made by torch's own cast:
scores of prompts through chunks and cache, and greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from tests.e2e.test_oracle import MODEL, TEXTS, expected_scores


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                # Times the reciprocal, as the scheme says: a division sends the ties among 0.06 % of the weights the
                # other way, and that alone moves scores by up to 0.1.
                scale = weight.abs().amax(1, keepdim=True) / 448
                weight.copy_((weight * (1 / scale)).to(torch.float8_e4m3fn).float() * scale)
    return model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(MODEL),
        dtype="float32",
        quantization="fp8",
        max_step_tokens=32,
        max_running=8,
        kv_blocks=256,
    ) as made:
        yield made


@pytest.mark.slow
def test_prompt_scores_are_those_of_the_same_numbers(llm: LLM, oracle: torch.nn.Module) -> None:
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    for output in outputs:
        assert output.prompt_logprobs is not None
        ours = torch.tensor([s.token.logprob for s in output.prompt_logprobs[1:] if s is not None])
        torch.testing.assert_close(
            ours, expected_scores(oracle, output.prompt_ids), atol=1e-3, rtol=0
        )


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_same_numbers(llm: LLM, oracle: torch.nn.Module) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for output in llm.generate(TEXTS[:2], params):
        ids = output.prompt_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids])).logits[0]
        for position in range(len(output.prompt_ids) - 1, len(ids) - 1):
            assert logits[position].max() - logits[position, ids[position + 1]] < 5e-3
