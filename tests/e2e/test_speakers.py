"""Models that hear with prompts or answers of their own form: Kimi-Audio and MOSS Transcribe-Diarize, served and asked
by the official client."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from openai.types.audio import TranscriptionDiarized

from headrace.base.config.kimi_audio import special_tokens
from tests.api.clients import openai_client
from tests.api.serving import _started
from tests.api.speech import tone, wav
from tests.front.media.folders import write_tokenizer
from tests.models import test_kimi_audio, test_moss_diarize
from tests.models.media import save_media_oracle
from tests.models.oracle import randomize
from tests.references.kimi_audio import Thinker

OPTIONS = (
    *("--dtype", "float32", "--device", "cpu", "--kv-blocks", "256", "--max-running", "4"),
    *("--served-model-name", "ear", "--threads", "1"),
)
FILE: Any = ("a.wav", wav(tone(0.7, 800.0)))


@pytest.mark.slow
def test_a_transcript_with_speakers(tmp_path: Path) -> None:
    """A random model's answer has no segments: it is one, and told in the form of OpenAI's clients."""
    mark = "<|audio_pad|>"
    ids = write_tokenizer(tmp_path, more=(mark,))
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text())
    written = "{% elif part.type == 'audio' %}" + mark + "{% else %}"
    facts["chat_template"] = facts["chat_template"].replace(
        "{% else %}{{ part", written + "{{ part"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    config = test_moss_diarize.config()
    config.audio_token_id, config.eos_token_id = ids[mark], ids["<|im_end|>"]
    config.text_config.vocab_size = ids[""]
    kind = transformers.MossTranscribeDiarizeForConditionalGeneration
    save_media_oracle(kind, config, tmp_path)
    served = _started(str(tmp_path), *OPTIONS)
    try:
        served.wait_ready()
        with openai_client(served.url) as client:
            create = client.audio.transcriptions.create
            told = create(model="ear", file=FILE, response_format="diarized_json")
            assert isinstance(told, TranscriptionDiarized) and told.duration == 0.7
            plain = create(model="ear", file=FILE)
            assert told.text == plain.text
            for segment in told.segments:
                assert 0.0 <= segment.start <= segment.end <= 0.7 and segment.speaker == "A"
            assert plain.text == " ".join(one.text for one in told.segments)
    finally:
        served.close()


@pytest.mark.slow
def test_two_streams_are_asked_as_chats_are(tmp_path: Path) -> None:
    """MOD-07: the answer of a chat with a sound is the reference's to the prompt that its package would make."""
    named = special_tokens(256)
    offset = 256 + 421 + 3
    config = {
        **test_kimi_audio.CONFIG,
        **{"vocab_size": offset + test_kimi_audio.ENTRIES, "kimia_token_offset": offset},
        "kimia_media_begin": named["<|im_media_begin|>"],
    }
    parts = {"audio_config": test_kimi_audio.PART}
    parts |= {"speech_tokenizer_config": test_kimi_audio.TOKENIZER}
    torch.manual_seed(3)
    reference = Thinker({**config, **parts}).eval()
    randomize(reference)
    test_kimi_audio.write_folder(tmp_path, reference)
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = (f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256))
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    samples = tone(0.7, 800.0)
    blank = named["<|im_kimia_text_blank|>"]
    with torch.inference_mode():
        count = len(reference.hear(samples)[0])
        user, begin = named["<|im_kimia_user_msg_start|>"], named["<|im_media_begin|>"]
        behind = ("<|im_media_end|>", "<|im_kimia_speech_ct_id|>", "<|im_msg_end|>")
        ends = [named[one] for one in (*behind, "<|im_kimia_assistant_msg_start|>")]
        heard = [user, blank, blank, begin, *[-1] * count, *ends]
        said = [blank, ord("H"), ord("i"), blank, *[blank] * count, *[blank] * len(ends)]
        expected: list[int] = []
        for _ in range(4):
            logits = reference(torch.tensor(heard), torch.tensor(said), [samples])
            expected.append(int(logits[-1].argmax()))
            heard, said = [*heard, blank], [*said, expected[-1]]
    data = base64.b64encode(wav(samples)).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, sound]}]
    served = _started(str(tmp_path), *OPTIONS, "--max-model-len", "512")
    try:
        served.wait_ready()
        with openai_client(served.url) as client:
            answer = client.chat.completions.create(
                model="ear",
                messages=messages,
                max_tokens=4,
                temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            told = answer.choices[0].model_extra or {}
            assert told["token_ids"] == expected
            written = client.audio.transcriptions.create(model="ear", file=FILE)
            assert isinstance(written.text, str)
    finally:
        served.close()
