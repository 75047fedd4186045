"""Moonshine and Canary, served: the text that the reference's model gives of a file, of long sound window by window,
and beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor

from headrace.base.config.hf import ConfigReader
from headrace.base.config.media import ProcessorSettings
from headrace.front.media.log_mel import RATE
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.media.processors.speech_families import read_speech
from headrace.front.media.quiet import windows
from tests.api.clients import openai_client
from tests.api.serving import _started
from tests.api.speech import wav
from tests.front.media.folders import write_tokenizer
from tests.front.media.test_log_mel import sound
from tests.models.media import save_media_oracle
from tests.models.test_moonshine import config
from tests.models.test_speech import BANDS, CONFORMER, DECODER

START, END = 3, "<|im_end|>"
CONTEXT = ("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>")
ASKED = ("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")


@pytest.mark.slow
def test_files_are_written_down(tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path)
    made = config(vocab_size=ids[""], decoder_start_token_id=START, eos_token_id=ids[END])
    oracle = save_media_oracle(transformers.MoonshineForConditionalGeneration, made, tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )

    def text(samples: np.ndarray) -> str:
        wave = torch.from_numpy((samples / 32768.0).astype(np.float32))[None]
        said = [START]
        with torch.inference_mode():
            while len(said) < 64 and said[-1] != ids[END]:
                logits = oracle(input_values=wave, decoder_input_ids=torch.tensor([said])).logits
                said.append(int(logits[0, -1].argmax()))
        return str(tokenizer.decode(said[1:], skip_special_tokens=True))

    options = ("--served-model-name", "ear", "--dtype", "float32", "--device", "cpu")
    server = _started("--model", str(tmp_path), *options)
    try:
        server.wait_ready()
        with openai_client(server.url) as client:

            def create(samples: np.ndarray, **more: Any) -> Any:
                file = ("sound.wav", wav(samples))
                return client.audio.transcriptions.create(model="ear", file=file, **more)

            sounds = [sound(seconds) for seconds in (0.4, 1.9, 3.3)]
            with ThreadPoolExecutor(3) as pool:
                answers = list(pool.map(lambda one: create(one).text, sounds))
            assert answers == [text(one).strip() for one in sounds] and all(answers)
            long = sound(33.0)
            long[27 * RATE : 28 * RATE] = 0
            parts = [text(long[a:b]) for a, b in windows(long, 30 * RATE)]
            answer = create(long, response_format="verbose_json")
            assert len(parts) == 2 and answer.text == " ".join(parts).strip()
            assert [one.text for one in answer.segments] == parts
            with create(long, stream=True) as events:
                said = [e.delta for e in events if e.type == "transcript.text.delta"]
            assert "".join(said) == answer.text
            for more in ({"language": "en"}, {"prompt": "names"}):
                with pytest.raises(openai.BadRequestError, match="takes none"):
                    create(sounds[0], **more)
            with pytest.raises(openai.BadRequestError, match="too short"):
                create(sounds[0][:300])
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:deprecated")  # by the client, of translations
def test_languages_and_translations(tmp_path: Path) -> None:
    """Canary: what its decoder begins with follows from the route and the language."""
    languages = ("<|en|>", "<|de|>")
    ids = write_tokenizer(tmp_path, more=(*CONTEXT, *languages, *ASKED))
    decoder = {**DECODER, "vocab_size": ids[""], "eos_token_id": ids[END]}
    made = transformers.CanaryConfig(
        vocab_size=ids[""],
        encoder_config=CONFORMER,
        decoder_config=decoder,
        decoder_start_token_id=ids[CONTEXT[0]],
        eos_token_id=ids[END],
    )
    oracle = save_media_oracle(transformers.CanaryForConditionalGeneration, made, tmp_path)
    extractor = ParakeetFeatureExtractor(feature_size=BANDS)
    extractor.save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    samples = sound(1.3)

    def text(*between: str) -> str:
        settings = read_speech(tmp_path, ConfigReader(made.to_dict(), "config.json"))
        assert settings is not None
        (one,) = spectrogram(samples, ProcessorSettings(sound=settings.sound)).inputs
        frames = torch.from_numpy(one.rows.view(np.float32))[None]
        said = [ids[name] for name in (*CONTEXT, *between, *ASKED)]
        begins = len(said)
        with torch.inference_mode():
            while len(said) < 64 and said[-1] != ids[END]:
                whole = oracle(input_features=frames, decoder_input_ids=torch.tensor([said]))
                said.append(int(whole.logits[0, -1].argmax()))
        return str(tokenizer.decode(said[begins:], skip_special_tokens=True)).strip()

    options = ("--served-model-name", "ear", "--dtype", "float32", "--device", "cpu")
    server = _started("--model", str(tmp_path), *options)
    try:
        server.wait_ready()
        with openai_client(server.url) as client:
            file = ("sound.wav", wav(samples))
            written = client.audio.transcriptions
            assert written.create(model="ear", file=file).text == text("<|en|>", "<|en|>")
            german = written.create(model="ear", file=file, language="de").text
            assert german == text("<|de|>", "<|de|>") and german
            with pytest.raises(openai.BadRequestError, match="known: de, en"):
                written.create(model="ear", file=file, language="fr")
            more = {"extra_body": {"language": "de"}}
            english = client.audio.translations.create(model="ear", file=file, **more).text
            assert english == text("<|de|>", "<|en|>")
    finally:
        server.close()
