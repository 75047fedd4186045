"""/inference/v1/generate and render -> generate -> derender against the direct route (contract 10, API-19)."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.serving import NO_TLS, Served
from tests.tokens.conftest import Renderer

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "What is 12 plus 30?"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Count: <|im_end|> 1 2 3"},
        ],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "description": "The weather in a city.",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                        "required": ["city"],
                    },
                },
            }
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"messages": [{"role": "user", "content": "List five animals."}], "stop": [","], "n": 2},
    {
        "messages": [{"role": "user", "content": "Say hello."}],
        "logprobs": True,
        "top_logprobs": 2,
    },
    {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "functions": [
            {
                "name": "get_weather",
                "description": "The weather in a city.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            }
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [
            {"type": "custom", "custom": {"name": "get_weather", "description": "The weather."}}
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {
        "messages": [{"role": "user", "content": "Hello?"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "include_reasoning": False,
    },
]
SCORED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "prompt_logprobs": 1,
}


def test_calls_of_every_kind_are_among_the_chats(bundled: Served) -> None:
    """Or else what follows would hold of nothing."""
    made = [post(bundled, "/v1/chat/completions", {**chat, "temperature": 0}) for chat in CHATS]
    messages = [answer["choices"][0]["message"] for answer in made]
    assert messages[2]["tool_calls"][0]["type"] == "function"
    assert messages[5]["function_call"]["name"] == "get_weather"
    assert messages[6]["tool_calls"][0]["type"] == "custom"


def post(served: Served, path: str, document: object) -> Any:
    answer = served.post(path, document)
    assert answer.status_code == 200, answer.text
    return answer.json()


def without_identity(answer: dict[str, Any]) -> str:
    """An answer's bytes without what is new each time: its id, its second, ids of calls, what was cached, and the
    scores (a prompt found in the cache is computed in another order)."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            call["id"] = "call"
    answer["usage"]["prompt_tokens_details"] = None
    written = json.dumps({**answer, "id": "", "created": 0})
    return json.dumps(json.loads(written, parse_float=lambda _: 0.0))


@pytest.mark.parametrize("chat", [*CHATS, SCORED], ids=range(len(CHATS) + 1))
def test_render_generate_derender_is_the_direct_answer(
    bundled: Served, chat: dict[str, Any]
) -> None:
    request = {**chat, "temperature": 0, "max_tokens": 60}
    direct = post(bundled, "/v1/chat/completions", request)
    rendered = post(bundled, "/v1/chat/completions/render", request)
    generated = post(bundled, "/inference/v1/generate", rendered)
    back = post(
        bundled,
        "/v1/chat/completions/derender",
        {"request": request, "response": generated, "token_ids": rendered["token_ids"]},
    )
    told, shown = generated["choices"][0]["logprobs"], back["choices"][0]["logprobs"]
    if told is not None:
        assert [t["logprob"] for t in told["content"]] == [t["logprob"] for t in shown["content"]]
    if (
        "functions" in chat
    ):  # the direct route stops behind the one call; ids alone do not say where it ends
        assert back["usage"].pop("completion_tokens") >= direct["usage"].pop("completion_tokens")
        del back["usage"]["total_tokens"], direct["usage"]["total_tokens"]
    assert without_identity(back) == without_identity(direct)


@pytest.mark.parametrize(
    "more",
    [
        *({}, {"echo": True}, {"logprobs": 1}, {"stop": " "}, {"prompt_logprobs": 2}),
        {"echo": True, "logprobs": 1},
    ],
)
def test_a_completion_too(bundled: Served, more: dict[str, Any]) -> None:
    request = {"prompt": "The cat", "temperature": 0, "max_tokens": 12, **more}
    direct = post(bundled, "/v1/completions", request)
    (rendered,) = post(bundled, "/v1/completions/render", request)
    generated = post(bundled, "/inference/v1/generate", rendered)
    back = post(bundled, "/v1/completions/derender", {"request": request, "response": generated})
    assert without_identity(back) == without_identity(direct)


def test_a_stream_of_ids_folds_to_the_plain_answer(bundled: Served) -> None:
    body = {
        "token_ids": post(bundled, "/tokenize", {"prompt": "The cat"})["tokens"],
        "sampling_params": {"temperature": 0, "max_tokens": 16, "n": 2, "logprobs": 1},
        "output_mode": "text",
    }
    plain = post(bundled, "/inference/v1/generate", body)
    ids: dict[int, list[int]] = {0: [], 1: []}
    texts, reasons, usages = ["", ""], ["", ""], []
    with httpx.stream(
        "POST",
        bundled.url + "/inference/v1/generate",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
        timeout=300,
        verify=NO_TLS,
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for chunk in map(json.loads, lines):
        if "usage" in chunk:
            usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
            assert bool(choice["logprobs"]) == bool(choice["token_ids"])
    assert [ids[0], ids[1]] == [choice["token_ids"] for choice in plain["choices"]]
    assert texts == [choice["text"] for choice in plain["choices"]]
    assert reasons == [choice["finish_reason"] for choice in plain["choices"]]
    assert (
        usages[0]["completion_tokens"]
        == plain["usage"]["completion_tokens"]
        == sum(map(len, ids.values()))
    )
    first = plain["choices"][0]["logprobs"]["content"][0]
    assert first["rank"] == 1 and first["top_logprobs"][0]["token_id"] == first["token_id"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": 10**6}}, "n"),
        ({"features": {"mm_hashes": {"image": ["x"]}}}, "features"),
        ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params"),
        ({"output_mode": "x"}, "output_mode"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"token_ids": [5] * 9000}, "token_ids"),
    ],
)
def test_what_cannot_be_done_is_refused_by_field(
    bundled: Served, change: dict[str, Any], field: str
) -> None:
    """P5, P8, P15; GHSA-3mqx: the length of the prompt is checked on this route too."""
    answer = bundled.post("/inference/v1/generate", {"token_ids": [5, 6], **change})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert field in (error["param"] or "")


def test_a_derender_that_does_not_fit_is_refused(bundled: Served) -> None:
    request = {"messages": [{"role": "user", "content": "x"}]}
    for response in (
        {"choices": []},
        {"choices": [{"token_ids": [10**7]}]},
        {"choices": [{"token_ids": [1], "index": 1}]},
        {
            "choices": [
                {"token_ids": [1], "logprobs": {"content": [{"token_id": 10**7, "logprob": 0}]}}
            ]
        },
    ):
        answer = bundled.post(
            "/v1/chat/completions/derender", {"request": request, "response": response}
        )
        assert answer.status_code == 400, answer.text


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": CHATS[2]["tools"], "tool_choice": "required"},
        pytest.param({"structured_outputs": {"regex": "a{3,9}"}}, marks=pytest.mark.slow),
        {"thinking_token_budget": 5},
    ],
    ids=["json", "call", "regex", "budget"],
)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_rendered_chat_carries_what_its_answer_must_look_like(
    bundled: Served, change: dict[str, Any], thinking: bool
) -> None:
    """Contract 10: a constraint behind reasoning, forced calls, a budget of reasoning."""
    kwargs = {"enable_thinking": thinking}
    chat = {**CHATS[0], **change, "chat_template_kwargs": kwargs, "temperature": 0}
    chat["max_tokens"] = 120
    direct = post(bundled, "/v1/chat/completions", chat)
    free = {**CHATS[0], "chat_template_kwargs": kwargs, "temperature": 0, "max_tokens": 120}
    rendered = post(bundled, "/v1/chat/completions/render", chat)
    at_once = {**rendered, "output_mode": "derender"}
    assert _said(post(bundled, "/inference/v1/generate", at_once)) == _said(direct)
    if "thinking_token_budget" not in change or thinking:
        assert _said(post(bundled, "/v1/chat/completions", free)) != _said(direct)
    generated = post(bundled, "/inference/v1/generate", rendered)
    back = {"request": chat, "response": generated, "token_ids": rendered["token_ids"]}
    assert _said(post(bundled, "/v1/chat/completions/derender", back)) == _said(direct)


def test_vllms_body_is_derendered(bundled: Served) -> None:
    """A generate answer as vLLM writes it, with null for what was not asked, beside the request."""
    chat = {**CHATS[2], "temperature": 0, "max_tokens": 60}
    direct = post(bundled, "/v1/chat/completions", chat)
    rendered = post(bundled, "/v1/chat/completions/render", chat)
    (choice,) = post(bundled, "/inference/v1/generate", rendered)["choices"]
    answer = _as_vllm_writes(choice)
    ids = rendered["token_ids"]
    body = {"generate_response": answer, "chat_request": chat, "prompt_token_ids": ids}
    back = post(bundled, "/v1/chat/completions/derender", {"stream": False, **body})
    direct["choices"][0]["stop_reason"] = None  # vLLM's answer has no such field
    assert without_identity(back) == without_identity(direct)

    bare = {"generate_response": answer, "prompt_tokens": 7}
    alone = post(bundled, "/v1/chat/completions/derender", bare)
    assert alone["usage"]["prompt_tokens"] == 7
    assert "get_weather" in alone["choices"][0]["message"]["content"], "no tools were told of"
    refused = bundled.post("/v1/chat/completions/derender", {"stream": True, **bare})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "generate_chunk", "a stream comes chunk by chunk"
    wrong = {"generate_response": {"choices": [{"token_ids": [10**7]}]}, "chat_request": chat}
    refused = bundled.post("/v1/chat/completions/derender", wrong)
    assert refused.status_code == 400 and "generate_response" in refused.json()["error"]["param"]


def test_vllms_body_of_several_prompts_is_derendered(bundled: Served) -> None:
    request = {
        "prompt": ["The cat", "A dog"],
        "temperature": 0,
        "max_tokens": 8,
        "n": 2,
        "echo": True,
    }
    direct = post(bundled, "/v1/completions", request)
    rendered = post(bundled, "/v1/completions/render", request)
    made = [post(bundled, "/inference/v1/generate", one) for one in rendered]
    body = {
        "generate_responses": [_as_vllm_writes(*one["choices"]) for one in made],
        "prompt_token_ids": [one["token_ids"] for one in rendered],
    }
    asked = {**body, "completion_request": request}
    back = post(bundled, "/v1/completions/derender", asked)
    assert without_identity(back) == without_identity(direct)
    alone = post(bundled, "/v1/completions/derender", body)
    texts = [choice["text"] for choice in alone["choices"]]
    assert [c["text"] for c in direct["choices"]] == [
        prompt + text for prompt, text in zip(("The cat",) * 2 + ("A dog",) * 2, texts, strict=True)
    ]
    few = {**asked, "prompt_tokens": [3]}
    refused = bundled.post("/v1/completions/derender", few)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_tokens"


def _as_vllm_writes(*choices: dict[str, Any]) -> dict[str, Any]:
    absent = ("routed_experts", "sampling_mask", "weight_versions", "logprobs")
    told = ("index", "token_ids", "finish_reason")
    written = [
        {**{name: choice[name] for name in told}, **dict.fromkeys(absent)} for choice in choices
    ]
    nothing = ("usage", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "metrics")
    return {
        "request_id": "x",
        "output_mode": "tokens",
        "choices": written,
        **dict.fromkeys(nothing),
    }


def test_a_rendered_chat_goes_on_with_its_last_message(bundled: Served) -> None:
    chat = {
        "messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "It is 4"}],
        **{"continue_final_message": True, "temperature": 0, "max_tokens": 20},
        "structured_outputs": {"regex": "[0-9]{1,3}!"},
    }
    direct = post(bundled, "/v1/chat/completions", chat)
    rendered = post(bundled, "/v1/chat/completions/render", chat)
    answer = post(bundled, "/inference/v1/generate", {**rendered, "output_mode": "derender"})
    assert _said(answer) == _said(direct)
    assert direct["choices"][0]["message"]["content"].endswith("!")


def _said(answer: dict[str, Any]) -> list[Any]:
    """Content, reasoning and calls of each choice, and how it ended."""
    said = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        texts = (message.get("content"), message.get("reasoning"))
        said.append((*texts, calls, choice["finish_reason"]))
    return said


def test_a_structure_of_a_completion_goes_along(bundled: Served) -> None:
    request = {"prompt": "The", "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
    (rendered,) = post(bundled, "/v1/completions/render", request)
    generated = post(bundled, "/inference/v1/generate", {**rendered, "output_mode": "text"})
    assert generated["choices"][0]["text"] in ("yes", "no")


def test_named_tokens_are_scored_along_the_prompt(bundled: Served) -> None:
    """What teachers are asked for in distillation (contract 10): row i scores token start + i + 1 of the prompt."""
    ids = post(bundled, "/tokenize", {"prompt": "The cat sat on the mat"})["tokens"]
    candidates = [ids[2], 5, ids[3]]
    asked = {"max_tokens": 1, "prompt_logprob_token_ids": candidates, "prompt_logprob_start": 1}
    body = {"token_ids": ids, "sampling_params": asked}
    answer = post(bundled, "/inference/v1/generate", body)
    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert scores.shape == (len(ids) - 2, 3) and scores.dtype == np.float32
    assert answer["prompt_logprobs"] is None and answer["choices"][0]["logprobs"] is None
    for i, row in enumerate(scores):
        for token_id, score in zip(candidates, row, strict=True):
            alone = {"token_ids": [*ids[: 2 + i], token_id], "sampling_params": {"max_tokens": 1}}
            alone["sampling_params"]["prompt_logprobs"] = 0
            told = post(bundled, "/inference/v1/generate", alone)["prompt_logprobs"][-1]
            assert abs(told[str(token_id)]["logprob"] - score) < 1e-3
    late = {**asked, "prompt_logprob_start": len(ids)}
    answer = post(bundled, "/inference/v1/generate", {**body, "sampling_params": late})
    raw = base64.b64decode(answer["prompt_token_id_logprobs"])
    assert np.load(io.BytesIO(raw)).shape == (0, 3)
    for more in ({"logprobs": 1}, {"prompt_logprobs": 0}, {"logprob_token_ids": [5]}):
        refused = bundled.post(
            "/inference/v1/generate", {**body, "sampling_params": {**asked, **more}}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprob_token_ids"


def _nucleus(logprobs: list[dict[str, Any]], p: float) -> set[int]:
    """The fewest of the likeliest tokens whose probabilities reach p."""
    kept, mass = set(), 0.0
    for one in sorted(logprobs, key=lambda one: -one["logprob"]):
        if mass >= p:
            break
        kept.add(one["token_id"])
        mass += float(np.exp(one["logprob"]))
    return kept


def test_tokens_are_told_with_those_they_were_drawn_among(bundled: Served) -> None:
    """vLLM's sampling_mask, which RL trainers replay: what truncation left of each token."""
    ids = post(bundled, "/tokenize", {"prompt": "The cat sat on"})["tokens"]
    fixed = {"max_tokens": 8, "seed": 3, "ignore_eos": True, "return_sampling_mask": True}
    fixed |= {"temperature": 1.5, "top_p": 1, "top_k": 0, "min_p": 0}

    def choice(**more: Any) -> dict[str, Any]:
        body = {"token_ids": ids, "sampling_params": {**fixed, **more}}
        (made,) = post(bundled, "/inference/v1/generate", body)["choices"]
        assert len(made["sampling_mask"]) == len(made["token_ids"]) == 8
        return dict(made)

    few = choice(top_k=5)
    assert few["logprobs"] is None
    assert all(len(mask) == 5 for mask in few["sampling_mask"])
    for token, mask in zip(few["token_ids"], few["sampling_mask"], strict=True):
        assert token in mask and mask == sorted(mask)
    scored = choice(temperature=1, top_p=0.6, logprobs=20)
    assert any(len(mask) > 1 for mask in scored["sampling_mask"])
    for entry, mask in zip(scored["logprobs"]["content"], scored["sampling_mask"], strict=True):
        if len(mask) < 20:
            assert set(mask) == _nucleus(entry["top_logprobs"], 0.6)
    greedy = choice(temperature=0)
    assert greedy["sampling_mask"] == [[token] for token in greedy["token_ids"]]
    processed = choice(top_k=3, logprobs=5, logprobs_mode="processed")
    for entry, mask in zip(
        processed["logprobs"]["content"], processed["sampling_mask"], strict=True
    ):
        likely = {one["token_id"] for one in entry["top_logprobs"] if one["logprob"] > -9999}
        assert likely == set(mask)
    body = {"token_ids": ids, "sampling_params": {**fixed, "top_k": 5}, "stream": True}
    streamed = [
        json.loads(line[6:])
        for line in bundled.post("/inference/v1/generate", body).text.splitlines()
        if line.startswith("data: {")
    ]
    told = [m for chunk in streamed for c in chunk["choices"] for m in c["sampling_mask"]]
    assert told == few["sampling_mask"]
    plain = {"token_ids": ids, "sampling_params": {"max_tokens": 2}}
    assert "sampling_mask" not in post(bundled, "/inference/v1/generate", plain)["choices"][0]


def test_tokenizer_info_is_told_where_it_was_asked_for(bundled: Served, renderer: Renderer) -> None:
    """Contract 9: it is opt-in."""
    refused = httpx.get(renderer.url + "/tokenizer_info", verify=NO_TLS, timeout=300)
    assert refused.status_code == 404 and "--tokenizer-info" in refused.json()["error"]["message"]
    info = bundled.get("/tokenizer_info").json()
    ids = post(bundled, "/tokenize", {"prompt": "<|im_end|>"})["tokens"]
    assert ids == [info["special_token_ids"]["<|im_end|>"]]
    assert info["vocab_size"] > max(ids) and info["tool_parser"] == "hermes"
    assert "message" in info["chat_template"]


@pytest.mark.parametrize("path", ["chat", "completion", "generate"])
def test_token_offsets_cut_the_texts_into_the_tokens(bundled: Served, path: str) -> None:
    """Spans of the prompt and of each answer, in code points of their texts with control tokens."""
    text = "Grüße an ☃ and 𝛼!"
    asked = {"max_tokens": 12, "temperature": 0, "n": 2, "return_token_offsets": True}
    ids = {"return_token_ids": True}
    if path == "generate":
        prompt = post(bundled, "/tokenize", {"prompt": text})["tokens"]
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": asked}
        answer = post(bundled, "/inference/v1/generate", body)
        told = {**answer, "prompt_token_ids": prompt}
    elif path == "chat":
        body = {"messages": [{"role": "user", "content": text}], **asked, **ids}
        answer = told = post(bundled, "/v1/chat/completions", body)
    else:
        answer = post(bundled, "/v1/completions", {"prompt": text, **asked, **ids})
        told = answer["choices"][0]
    _assert_spans(bundled, told["prompt_token_ids"], told["prompt_token_offsets"])
    for choice in answer["choices"]:
        _assert_spans(bundled, choice["token_ids"], choice["token_offsets"])


def _assert_spans(served: Served, ids: list[int], spans: list[tuple[int, int]]) -> None:
    whole = post(served, "/detokenize", {"tokens": ids})["prompt"]
    assert len(spans) == len(ids) > 0 and spans[0][0] == 0 and spans[-1][1] == len(whole)
    for token, (begin, end) in zip(ids, spans, strict=True):
        alone = post(served, "/detokenize", {"tokens": [token]})["prompt"]
        assert alone == whole[begin:end] or "\ufffd" in alone


def test_clients_of_llama_cpp_are_told_what_is_served_and_the_prompt(bundled: Served) -> None:
    """BEY-42."""
    props = bundled.get("/props").json()
    listed = bundled.get("/v1/models").json()["data"][0]
    assert props["default_generation_settings"]["n_ctx"] == listed["max_model_len"]
    assert props["modalities"] == {"vision": False, "audio": False}
    told = bundled.get("/tokenizer_info").json()["chat_template"]
    assert props["chat_template"] == told
    chat = {"messages": [{"role": "user", "content": "The cat"}]}
    prompt = post(bundled, "/apply-template", chat)["prompt"]
    rendered = post(bundled, "/tokenize", chat)["tokens"]
    assert "The cat" in prompt
    again = post(bundled, "/tokenize", {"prompt": prompt, "add_special_tokens": False})["tokens"]
    assert again == rendered
