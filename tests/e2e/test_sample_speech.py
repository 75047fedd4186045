"""Moonshine, served: the text that the reference's model gives of a file, of long sound window by window, and beside
others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from headrace.front.media.log_mel import RATE
from headrace.front.media.quiet import windows
from tests.api.clients import openai_client
from tests.api.serving import _started
from tests.api.speech import wav
from tests.front.media.folders import write_tokenizer
from tests.front.media.test_log_mel import sound
from tests.models.media import save_media_oracle
from tests.models.test_moonshine import config

START, END = 3, "<|im_end|>"


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
