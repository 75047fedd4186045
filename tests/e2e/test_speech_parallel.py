"""Speech models over two ranks write what one writes: towers are whole on every rank, decoders divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.api.clients import openai_client
from tests.api.serving import _started
from tests.api.speech import wav
from tests.e2e.test_timed_speech import Timed
from tests.front.media.folders import write_tokenizer
from tests.front.media.test_log_mel import sound
from tests.models.ctc import CASES
from tests.models.media import save_media_oracle
from tests.models.test_moonshine import config


def _moonshine(folder: Path) -> None:
    ids = write_tokenizer(folder)
    made = config(vocab_size=ids[""], decoder_start_token_id=3, eos_token_id=ids["<|im_end|>"])
    save_media_oracle(transformers.MoonshineForConditionalGeneration, made, folder)


MODELS = {
    "wav2vec2": lambda folder: CASES["wav2vec2"].write(folder),
    "moonshine": _moonshine,
    "voxtral-realtime": Timed,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_write_what_one_writes(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    texts = []
    for ranks in ("1", "2"):
        options = ("--dtype", "float32", "--device", "cpu", "--tensor-parallel", ranks)
        server = _started("--model", str(tmp_path), "--served-model-name", "ear", *options)
        try:
            server.wait_ready()
            with openai_client(server.url) as client:
                file = ("sound.wav", wav(sound(1.7)))
                texts.append(client.audio.transcriptions.create(model="ear", file=file).text)
        finally:
            server.close()
    assert texts[0] == texts[1] and texts[0]
