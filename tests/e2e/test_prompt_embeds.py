"""Vectors in the place of a prompt, against transformers' `inputs_embeds` and against the same
prompt as text, offline and by vLLM's clients (ENG-27; security: P15)."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.base.errors import ContextTooLong, InvalidRequest
from tests.api.clients import openai_client
from tests.api.serving import serving

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
TEXT = "Once upon a time there was a fox who lived by the river. " * 4
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(MODEL),
        dtype="float32",
        max_step_tokens=32,
        max_running=4,
        max_model_len=512,
        enable_prompt_embeds=True,
    ) as made:
        yield made


def embedded(oracle: Any, ids: list[int]) -> torch.Tensor:
    return oracle.get_input_embeddings()(torch.tensor(ids)).detach()


def file_of(tensor: torch.Tensor) -> str:
    """As vLLM's clients send it."""
    data = io.BytesIO()
    torch.save(tensor, data)
    return base64.b64encode(data.getvalue()).decode()


def test_vectors_of_no_token_are_read_as_transformers_reads_them(llm: LLM, oracle: Any) -> None:
    """Several chunks, then the same once more, from the prefix cache."""
    torch.manual_seed(3)
    x_TE = 0.5 * torch.randn(70, oracle.config.hidden_size)
    for vectors in (x_TE, x_TE[None].numpy()):
        output = llm.generate([{"prompt_embeds": vectors}], GREEDY)[0]
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            whole = torch.cat((x_TE, embedded(oracle, tokens)))
            logits = oracle(inputs_embeds=whole[None]).logits[0]
        for place, token in enumerate(tokens, 69):
            assert logits[place].max() - logits[place, token] < 1e-3
    assert output.num_cached == 64
    changed = x_TE.clone()
    changed[0] += 1.0
    other = llm.generate([{"prompt_embeds": changed}], GREEDY)[0]
    assert other.num_cached == 0


def test_parts_of_chats_stand_where_their_text_would(llm: LLM, oracle: Any) -> None:
    """The template around them is the server's; texts beside them stay."""
    said = "What is 17 + 25?"
    vectors = embedded(oracle, llm.tokenizer.encode_plain(said)).numpy()
    text = {"role": "user", "content": [{"type": "text", "text": said}]}
    part = {"type": "prompt_embeds", "data": vectors}
    plain = llm.chat([text], GREEDY)[0]
    chat = llm.chat([{"role": "user", "content": [part]}], GREEDY)[0]
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(chat.prompt_ids) == len(plain.prompt_ids)
    beside = [{"type": "text", "text": "Listen \ufdd4:"}, part]  # a text cannot stand for vectors
    assert llm.chat([{"role": "user", "content": beside}], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        (np.zeros((3, 7), np.float32), InvalidRequest, "vectors of 7 numbers; those of this model"),
        (np.full((1, 384), np.nan, np.float32), InvalidRequest, "numbers that are none"),
        (np.zeros((0, 384), np.float32), InvalidRequest, "one vector for each token"),
        (np.zeros(384, np.float32), InvalidRequest, "one vector for each token"),
        (
            np.zeros((513, 384), np.float32),
            InvalidRequest,
            "one vector for each token is needed, 1 to 512",
        ),
        (np.zeros((512, 384), np.float32), ContextTooLong, "prompt is too long: 512 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    vectors: np.ndarray, error: type[Exception], message: str, llm: LLM
) -> None:
    with pytest.raises(error, match=message):
        llm.generate([{"prompt_embeds": vectors}], GREEDY)


def test_scores_of_tokens_that_are_none_are_refused(llm: LLM) -> None:
    vectors = np.zeros((4, 384), np.float32)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with pytest.raises(InvalidRequest, match="prompt_logprobs: does not go with vectors"):
        llm.generate([{"prompt_embeds": vectors}], scored)


@pytest.mark.slow
def test_vllms_clients_are_answered(oracle: Any) -> None:
    flags = ("--dtype", "float32", "--enable-prompt-embeds", "--served-model-name", "m")
    with serving(None, str(MODEL), *flags) as served, openai_client(served.url) as client:
        from headrace.front.text.tokenizer_files import load_tokenizer

        ids = load_tokenizer(str(MODEL)).encode(TEXT)
        vectors = embedded(oracle, ids)
        ask: dict[str, Any] = {"model": "m", "max_tokens": 6, "temperature": 0}
        plain = client.completions.create(prompt=TEXT, **ask).choices[0].text
        several = [file_of(vectors.bfloat16()), file_of(vectors)]
        for sent, at in ((file_of(vectors), 0), (several, 1)):
            for prompt in ("", "x"):
                answer = client.completions.create(
                    prompt=prompt, extra_body={"prompt_embeds": sent}, **ask
                )
                assert answer.choices[at].text == plain
                assert len(answer.choices) == at + 1 + len(prompt)
        alone = served.post("/v1/completions", {**ask, "prompt_embeds": file_of(vectors)})
        assert alone.json()["choices"][0]["text"] == plain
        part: Any = {"type": "prompt_embeds", "data": file_of(vectors)}
        chats = [
            client.chat.completions.create(messages=[{"role": "user", "content": content}], **ask)
            for content in ([part], TEXT)
        ]
        assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
        for bad in (torch.eye(384).to_sparse(), vectors[:, :9], torch.full((1, 384), torch.inf)):
            reply = served.post("/v1/completions", {**ask, "prompt_embeds": file_of(bad)})
            assert reply.status_code == 400 and "prompt_embeds" in reply.text
        assert served.at_rest()
