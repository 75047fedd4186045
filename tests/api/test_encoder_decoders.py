"""Encoder-decoders over a real socket and by LLM.generate: a tiny random BART against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headrace import LLM, SamplingParams
from headrace.base.errors import ConfigError, RequestError
from tests.api.clients import openai_client
from tests.api.serving import serving
from tests.models.encoder_decoder_rank import saved

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "__aa__", "__bb__"]
WORDS = [*SPECIAL, *(f"w{i}" for i in range(90))]
TEXTS = ["w1 w2 w3", "w40 w41 w42 w43 w44 w45 w46 w47 w48 w49", "w9"]
OPTIONS = {"threads": 1, "max_running": 4, "kv_blocks": 64}


def write_bart(folder: Path) -> Any:
    config = transformers.BartConfig(
        vocab_size=len(WORDS),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=40,
        decoder_start_token_id=2,
        forced_bos_token_id=0,
        forced_eos_token_id=None,
        eos_token_id=2,
        dtype="float32",
    )
    oracle = saved(config, folder)
    oracle.generation_config.forced_bos_token_id = 0
    oracle.generation_config.save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return oracle


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bart")
    return folder, write_bart(folder)


def ids_of(text: str) -> list[int]:
    return [0, *(WORDS.index(word) for word in text.split()), 2]


def expected(oracle: Any, text: str, count: int) -> list[int]:
    """The oracle's own generate, without the tokens that every answer begins with."""
    ids = oracle.generate(
        torch.tensor([ids_of(text)]), num_beams=1, do_sample=False, max_new_tokens=count + 1
    )[0].tolist()
    assert ids[:2] == [2, 0]
    return ids[2:]


@pytest.mark.slow
def test_llm_generate_continues_as_transformers_does(bart: tuple[Path, Any]) -> None:
    folder, oracle = bart
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(str(folder), **OPTIONS) as llm:
        for output, text in zip(llm.generate(TEXTS, params), TEXTS, strict=True):
            assert output.prompt_ids == ids_of(text)
            assert output.outputs[0].token_ids == expected(oracle, text, 12)
        with pytest.raises(RequestError, match=r"41 tokens > 40 that the encoder reads"):
            llm.generate([[5] * 41], params)
        with pytest.raises(RequestError, match="prompt_logprobs: does not go with an encoder"):
            llm.generate(TEXTS, SamplingParams(prompt_logprobs=1, max_tokens=2))


@pytest.fixture(scope="module")
def client(bart: tuple[Path, Any]) -> Iterator[openai.OpenAI]:
    flags = [word for k, v in OPTIONS.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    with (
        serving(None, str(bart[0]), *flags, "--served-model-name", "bart") as served,
        openai_client(served.url) as found,
    ):
        assert any("prefix-caching" in line for line in served.lines)
        yield found
        assert served.at_rest()


def test_a_translator_is_told_the_language(bart: tuple[Path, Any], client: openai.OpenAI) -> None:
    """The decoder begins with the target's token in place of the one that the checkpoint forces."""

    def asked(**fields: Any) -> Any:
        more = {"return_token_ids": True, **fields}
        return client.completions.create(
            model="bart", prompt=TEXTS[0], max_tokens=6, temperature=0, extra_body=more
        )

    told = bart[1].generate(
        torch.tensor([ids_of(TEXTS[0])]),
        **{"num_beams": 1, "do_sample": False, "max_new_tokens": 7, "forced_bos_token_id": 5},
    )
    assert asked(target_language="bb").choices[0].token_ids == told[0].tolist()[2:]
    assert told[0].tolist()[2:] != expected(bart[1], TEXTS[0], 6)
    for fields, message in (
        ({"target_language": "cc"}, "target_language: 'cc' given; known: aa, bb"),
        ({"source_language": "aa"}, "neither begins nor ends with a language's token"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            asked(**fields)


def test_completions_answer_with_the_decoders_tokens(
    bart: tuple[Path, Any], client: openai.OpenAI
) -> None:
    oracle = bart[1]
    answer = client.completions.create(
        model="bart",
        prompt=TEXTS,
        max_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    for choice, text in zip(answer.choices, TEXTS, strict=True):
        wanted = expected(oracle, text, 12)
        assert choice.token_ids == wanted
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)
    streamed = client.completions.create(
        model="bart", prompt=TEXTS[0], max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": "w1 " * 60}, "62 tokens > 40"),
        ({"echo": True}, "echo: does not go with an encoder-decoder"),
        ({"suffix": "w1"}, "suffix: does not go with an encoder-decoder"),
        ({"extra_body": {"use_beam_search": True}}, "beam_width: does not go with"),
    ],
)
def test_what_an_encoder_cannot_read_is_refused(
    client: openai.OpenAI, more: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"model": "bart", "prompt": "w1", "max_tokens": 3, **more}
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**fields)


def test_what_encoder_decoders_do_not_do_is_refused_at_start(bart: tuple[Path, Any]) -> None:
    folder, _ = bart
    with pytest.raises(ConfigError, match="has an encoder before its decoder"):
        LLM(str(folder), speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="BartForConditionalGeneration has an encoder"):
        LLM(str(folder), deterministic=True)
    config = json.loads((folder / "config.json").read_text())
    assert "decoder_start_token_id" in config
