"""GritLM generates as Mistral does and embeds with all tokens seeing each other, in one engine: a tiny random one
against transformers, through scheduler, chunks and cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit

from headrace import LLM, SamplingParams
from headrace.base.config.hf import read_json
from headrace.base.errors import RequestError

pytestmark = pytest.mark.slow
LEAD = ["▁<", "|", "embed", "|", ">", "<0x0A>"]
WORDS = ["<s>", "</s>", "<unk>", "<", *dict.fromkeys(LEAD), "user"]
WORDS += [f"w{i}" for i in range(96 - len(WORDS))]
PLAIN = ["<s>", *LEAD]
INSTRUCTED = ["<s>", "▁<", "|", "user", "|", ">", "<0x0A>", *(f"w{i}" for i in range(9))]
INSTRUCTED += ["<0x0A>", "<", *LEAD[1:]]
TEXT = [20 + i * 7 % 70 for i in range(45)]
Made = tuple[LLM, transformers.MistralForCausalLM]


def ids_of(words: list[str]) -> list[int]:
    return [WORDS.index(word) for word in words]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder: Path = tmp_path_factory.mktemp("gritlm")
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 24},
        **{"max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1},
        attn_implementation="eager",
        initializer_range=0.4,
    )
    oracle = transformers.MistralForCausalLM(config).eval()
    oracle.save_pretrained(folder)
    raw = read_json(folder / "config.json") | {"architectures": ["GritLM"]}
    (folder / "config.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"max_step_tokens": 80, "max_running": 4, "kv_blocks": 64, "threads": 1}
    with LLM(str(folder), dtype="float32", **options) as llm:
        yield llm, oracle


def embedding(oracle: transformers.MistralForCausalLM, ids: list[int], first: int) -> np.ndarray:
    """Mistral's states where the mask hides nothing: the mean behind the instruction."""
    seen = torch.zeros(1, 1, len(ids), len(ids))
    with torch.inference_mode():
        states = oracle.model(torch.tensor([ids]), attention_mask=seen).last_hidden_state[0]
    mean = states[first:].mean(0)
    return (mean / mean.norm()).numpy()


def continued(oracle: transformers.MistralForCausalLM, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a pass over all before."""
    known = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            known.append(int(oracle(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(ids) :]


@pytest.mark.parametrize("lead", [PLAIN, INSTRUCTED, ["<s>"]])
def test_texts_are_embedded_by_what_follows_the_instruction(made: Made, lead: list[str]) -> None:
    llm, oracle = made
    ids = ids_of(lead)
    texts = [ids + TEXT, ids + TEXT[:1], ids + TEXT[5:20]]
    first = 0 if len(lead) == 1 else len(lead)
    for ours, text in zip(llm.embed(texts), texts, strict=True):
        np.testing.assert_allclose(ours, embedding(oracle, text, first), atol=1e-4)


def test_what_was_embedded_is_no_prefix_of_what_is_generated(made: Made) -> None:
    llm, oracle = made
    ids = [0, *TEXT]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    wanted = continued(oracle, ids, 8)
    before = llm.embed([ids])[0]
    for _ in range(2):
        assert llm.generate([ids], params)[0].outputs[0].token_ids == wanted
    np.testing.assert_allclose(llm.embed([ids])[0], before, atol=1e-5)
    np.testing.assert_allclose(before, embedding(oracle, ids, 0), atol=1e-4)


def test_texts_that_fit_no_step_or_say_nothing_are_refused(made: Made) -> None:
    llm, _ = made
    with pytest.raises(RequestError, match="81 tokens that see each other"):
        llm.embed([[0] + [30] * 80])
    with pytest.raises(RequestError, match="empty behind its instruction"):
        llm.embed([ids_of(PLAIN)])
