"""Sounds through the whole engine, in every dialect: the tokens that transformers gives for the same prompt."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.base.config.media import MediaSpec
from headrace.front.client.chat_transcription import parsed
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.spectrogram import spectrogram
from tests.api.clients import openai_client
from tests.api.serving import Served, _started
from tests.api.speech import tone, wav
from tests.back.lora.adapters import merge, write_adapter
from tests.front.media.folders import write_tokenizer
from tests.models import hearing_cases, test_hearing
from tests.models.media import Prompt, answer_of, save_media_oracle

MARK, END = "<|audio_pad|>", "<|im_end|>"
AROUND = ("<|audio>", "<audio|>")
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """A model in a folder, and the reference's model of it."""

    folder: Path
    case: test_hearing.Case
    oracle: Any
    ids: dict[str, int]
    spec: MediaSpec

    def tokens(self, text: str, samples: list[np.ndarray], count: int = 8) -> list[int]:
        """What the reference answers to a prompt with one placeholder for each sound."""
        media = [spectrogram(one, self.spec.settings).inputs[0] for one in samples]
        sound = self.spec.settings.sound
        assert sound is not None
        for one in media:
            marked = ("<|X|>" * one.num_tokens).join(sound.around)
            text = text.replace(MARK, marked, 1)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json")
        )
        ids = tokenizer.encode(text.replace("<|X|>", MARK))
        frames = [torch.from_numpy(one.rows.view(np.float32).copy()) for one in media]
        inputs = {"input_ids": torch.tensor([ids])}
        inputs |= self.case.inputs(frames) if frames else {}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if self.case.typed:
            inputs["mm_token_type_ids"] = 3 * (inputs["input_ids"] == self.ids[MARK]).long()
        return answer_of(self.oracle, Prompt(ids=ids), inputs, count).tokens

    def text_of(self, tokens: list[int]) -> str:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json")
        )
        return str(tokenizer.decode(tokens, skip_special_tokens=True))


def hearing(name: str, folder: Path) -> Hearing:
    ids = write_tokenizer(folder, more=(MARK, *AROUND))
    template = json.loads((folder / "tokenizer_config.json").read_text())
    written = "{% elif part.type == 'audio' %}" + MARK + "{% else %}"
    template["chat_template"] = template["chat_template"].replace(
        "{% else %}{{ part", written + "{{ part"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    case = (test_hearing.CASES | hearing_cases.CASES)[name]
    config = case.config()
    config.audio_token_id, config.audio_token_index = ids[MARK], ids[MARK]
    config.eos_token_id = ids[END]
    config.boa_token_id, config.eoa_token_index = (ids[one] for one in AROUND)
    text = config.text_config
    text.vocab_size, text.eos_token_id, text.bos_token_id = ids[""], ids[END], None
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = ids[""]
    if name == "gemma3n":
        _put_behind_text(config, ids[""], ids[MARK])
    oracle = save_media_oracle(case.oracle or _model_class(case.model), config, folder)
    spec = read_media(folder, json.loads((folder / "config.json").read_text()))
    assert spec is not None and spec.audio_token == ids[MARK]
    return Hearing(folder=folder, case=case, oracle=oracle, ids=ids, spec=spec)


def _put_behind_text(config: Any, num_words: int, mark: int) -> None:
    """Gemma 3n: ids of the towers' rows, one of each of which ends a medium, are behind those of text, and places of
    media behind those that layers have rows for; its extractor's bands."""
    image, sound = config.vision_config, config.audio_config
    image.vocab_offset = config.eoi_token_id = num_words
    sound.vocab_offset = config.eoa_token_id = num_words + image.vocab_size
    config.text_config.vocab_size = num_words + image.vocab_size + sound.vocab_size
    config.text_config.vocab_size_per_layer_input = mark
    sound.input_feat_size = 128


def _model_class(name: str) -> Any:
    """Most are named by what they do too."""
    return getattr(transformers, f"{name}ForConditionalGeneration", None) or getattr(
        transformers, name
    )


def prompt(*parts: str) -> str:
    return f"<|im_start|>user\n{''.join(parts)}{END}\n<|im_start|>assistant\n"


def url(samples: np.ndarray) -> str:
    return "data:audio/wav;base64," + base64.b64encode(wav(samples)).decode()


SOUNDS = [tone(0.4, 300.0), tone(0.7, 800.0)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-audio", "voxtral", *hearing_cases.CASES])
def test_chats_hear(name: str, tmp_path: Path) -> None:
    model = hearing(name, tmp_path)
    of_one_length = name.startswith("granite-speech")
    sounds = [SOUNDS[0], tone(0.4, 500.0)] if of_one_length else SOUNDS
    parts = [{"type": "audio", "audio": wav(one)} for one in sounds]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "the fox?"}]}
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_blocks=256) as llm:
        (chat,) = llm.chat([message], PARAMS, progress=False)
        given = {"prompt": MARK + "quick", "multi_modal_data": {"audio": wav(SOUNDS[1])}}
        (plain,) = llm.generate([given], PARAMS, progress=False)
    assert chat.outputs[0].token_ids == model.tokens(prompt(MARK, MARK, "the fox?"), sounds)
    assert plain.outputs[0].token_ids == model.tokens(MARK + "quick", SOUNDS[1:])


@pytest.mark.slow
def test_the_adapter_of_a_checkpoint_runs_where_it_hears(tmp_path: Path) -> None:
    """MOD-08: the same words with and without a sound; without, the answer is that of the weights alone."""
    model = hearing("granite-speech", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "has_lora_adapter": True}))
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in model.oracle.model.language_model.named_modules()
        if name.endswith(("q_proj", "v_proj"))
    }
    own = {f"language_model.model.{name}": size for name, size in linears.items()}
    adapter = write_adapter(tmp_path, own, size=1.5)
    message = {"role": "user", "content": [{"type": "text", "text": "the fox?"}]}
    heard = {"role": "user", "content": [{"type": "audio", "audio": wav(SOUNDS[0])}]}
    heard["content"] += message["content"]
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_blocks=256) as llm:
        with_sound, plain = llm.chat([[heard], [message]], PARAMS, progress=False)
    plainly = model.tokens(prompt(MARK, "the fox?"), SOUNDS[:1])
    assert plain.outputs[0].token_ids == model.tokens(prompt("the fox?"), [])
    adapter.pairs = {f"model.{k.replace('.model', '')}": v for k, v in adapter.pairs.items()}
    adapter.scales = {f"model.{k.replace('.model', '')}": v for k, v in adapter.scales.items()}
    merge(model.oracle, adapter)
    merged = model.tokens(prompt(MARK, "the fox?"), SOUNDS[:1])
    assert with_sound.outputs[0].token_ids == merged != plainly


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    return hearing("qwen3-asr", tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def served(model: Hearing) -> Iterator[Served]:
    options = ("--dtype", "float32", "--device", "cpu", "--kv-blocks", "256", "--max-running", "4")
    found = _started(str(model.folder), *options, "--served-model-name", "ear", "--threads", "1")
    try:
        found.wait_ready()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_client(served.url) as found:
        yield found


@pytest.mark.slow
def test_sounds_in_every_dialect(model: Hearing, client: openai.OpenAI) -> None:
    data = base64.b64encode(wav(SOUNDS[0])).decode()
    inline: Any = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    linked: Any = {"type": "audio_url", "audio_url": {"url": url(SOUNDS[1])}}
    words: Any = {"type": "text", "text": "the fox?"}
    more: Any = {"model": "ear", "temperature": 0, "extra_body": {"ignore_eos": True}}
    wanted = model.text_of(model.tokens(prompt(MARK, MARK, "the fox?"), SOUNDS))
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": [inline, linked, words]}], max_tokens=8, **more
    )
    assert chat.choices[0].message.content == wanted
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    sounds = [spectrogram(one, model.spec.settings).inputs[0].num_tokens for one in SOUNDS]
    assert chat.usage.prompt_tokens_details.audio_tokens == sum(sounds)
    said: Any = [{"role": "user", "content": [inline, linked, {**words, "type": "input_text"}]}]
    response = client.responses.create(input=said, max_output_tokens=16, **more)
    assert response.output_text.startswith(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "input_audio", "input_audio": {"data": "%%", "format": "wav"}}, "is not base64"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "the sound is none of"),
        ({"type": "audio_url", "audio_url": {"url": "http://localhost/a.wav"}}, "fetching is off"),
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "this model takes no image"),
    ],
)
def test_what_cannot_be_heard_is_refused(
    client: openai.OpenAI, part: dict[str, Any], said: str
) -> None:
    content: Any = [part]
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(
            model="ear", messages=[{"role": "user", "content": content}], max_tokens=2
        )


@pytest.mark.slow
def test_speech_becomes_text(model: Hearing, client: openai.OpenAI) -> None:
    """MOD-03: the turn of sound alone, words that may occur before it, a language in the model's mouth."""
    create = client.audio.transcriptions.create
    file: Any = ("a.wav", wav(SOUNDS[1]))
    opening = f"<|im_start|>system\nthe fox{END}\n" + prompt(MARK)
    tokens = model.tokens(opening, SOUNDS[1:], 40)
    wanted = model.text_of(
        tokens[: tokens.index(model.ids[END])] if model.ids[END] in tokens else tokens
    )
    told = create(model="ear", file=file, prompt="the fox")
    assert told.text.startswith(wanted.strip()) and wanted.strip()
    stream = create(model="ear", file=file, prompt="the fox", stream=True)
    *deltas, done = list(stream)
    assert "".join(one.delta for one in deltas) == done.text == told.text
    spoken = opening + "language German<asr_text>"
    tokens = model.tokens(spoken, SOUNDS[1:], 40)
    wanted = model.text_of(
        tokens[: tokens.index(model.ids[END])] if model.ids[END] in tokens else tokens
    )
    verbose = create(
        model="ear", file=file, prompt="the fox", language="de", response_format="verbose_json"
    )
    assert verbose.language == "de" and verbose.text.startswith(wanted.strip())
    (segment,) = verbose.segments or []
    assert (segment.start, segment.end) == (0.0, 0.7)
    for more, said in (
        ({"language": "xx"}, "language: 'xx' given; known: ar, cs"),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
            "tells no times of words",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            create(model="ear", file=file, **more)


def test_the_language_stands_before_the_text() -> None:
    assert parsed("language German<asr_text>guten Tag", None) == ("de", "guten Tag")
    assert parsed("language None<asr_text>", None) == ("", "")
    assert parsed("only text", None) == ("", "only text")
    assert parsed("guten Tag", "de") == ("de", "guten Tag")
