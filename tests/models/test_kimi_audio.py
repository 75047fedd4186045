"""Kimi-Audio hears as an independent reference does, which reads two streams of tokens: sounds and text in one prompt,
text alone, a cached prefix, each beside the others (MOD-07)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.base.config.hf import ConfigReader
from headrace.base.config.kimi_audio import CHAT_TEMPLATE, blank_of, special_tokens
from headrace.base.config.media import MediaSpec
from headrace.base.errors import CheckpointError
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import MediaMark
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.config_files import read_config
from headrace.launch.hub import wanted_files
from tests.front.media.test_log_mel import sound
from tests.models.media import Answer, SeeingEngine, compare_answers
from tests.models.oracle import randomize
from tests.models.test_pictures import Ready
from tests.references.kimi_audio import Thinker

FIRST = 12
"""Ids of text."""
OFFSET, ENTRIES = 440, 24
VOCABULARY = OFFSET + ENTRIES
SPECIAL = special_tokens(FIRST)
BLANK = SPECIAL["<|im_kimia_text_blank|>"]
PART = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
    **{"num_mel_bins": 12, "max_source_positions": 1500, "activation_function": "gelu"},
}
TOKENIZER = {
    **PART,
    **{"quantize_position": 1, "pooling_position": 1, "pooling_kernel_size": 4},
    **{"pooling_type": "avg", "quantize_vocab_size": ENTRIES, "quantize_causal_block_size": 20},
    **{"encoder_causal_convolution": True},
}
CONFIG: dict[str, Any] = {
    **{"architectures": ["MoonshotKimiaForCausalLM"], "model_type": "kimi_audio"},
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    **{"kimia_media_begin": SPECIAL["<|im_media_begin|>"], "kimia_token_offset": OFFSET},
    **{"kimia_adaptor_input_dim": 64},
}
FOLDERS = {"whisper-large-v3": "hears", "glm-4-voice-tokenizer": "tells"}


@dataclass(frozen=True, kw_only=True)
class Kimi:
    folder: Path
    reference: Thinker
    engine: SeeingEngine
    spec: MediaSpec

    def ready(self, ids: Sequence[int], sounds: Sequence[np.ndarray]) -> Ready:
        """A prompt in which each blank stands for a sound."""
        media = [
            _prepared(spectrogram(one, self.spec.settings), "audio", sha256(one).digest(), 0, 1)
            for one in sounds
        ]
        return Ready(*expanded(list(ids), media, self.spec, lambda text: [], field="prompt"))

    def expected(self, prompt: Ready, sounds: Sequence[np.ndarray], count: int) -> Answer:
        """By both streams: text and marks beside blanks; sounds beside blanks."""
        ids, answer = list(prompt.ids), Answer()
        with torch.inference_mode():
            for turn in range(count):
                heard = torch.tensor([BLANK if one < FIRST else one for one in ids])
                said = torch.tensor([one if one < FIRST else BLANK for one in ids])
                heard[: len(prompt.ids)][torch.tensor(prompt.ids) == BLANK] = -1
                rows = self.reference(heard, said, list(sounds)).log_softmax(-1).numpy()
                if not turn:
                    answer.prompt_logprobs = list(rows[:-1])
                answer.logprobs.append(rows[-1])
                answer.tokens.append(int(rows[-1].argmax()))
                ids.append(answer.tokens[-1])
        return answer


def write_folder(folder: Path, reference: Thinker) -> None:
    state = {name: one.contiguous() for name, one in reference.state_dict().items()}
    parts = tuple(f"{part}." for part in FOLDERS.values())
    own = {name: one for name, one in state.items() if not name.startswith(parts)}
    own["model.mimo_norm.weight"] = torch.ones(32)
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, part in FOLDERS.items():
        (folder / name).mkdir()
        inside = {
            f"model.encoder.{key.removeprefix(f'{part}.')}": one
            for key, one in state.items()
            if key.startswith(f"{part}.")
        }
        inside["model.decoder.layer_norm.weight"] = torch.ones(16)
        save_file(inside, folder / name / "model.safetensors")
        config = TOKENIZER if part == "tells" else PART
        (folder / name / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kimi]:
    folder = tmp_path_factory.mktemp("kimi")
    torch.manual_seed(3)
    config = {**CONFIG, "audio_config": PART, "speech_tokenizer_config": TOKENIZER}
    reference = Thinker(config).eval()
    randomize(reference)
    write_folder(folder, reference)
    whole = read_config(folder)
    spec = read_media(folder, whole)
    assert spec is not None and spec.audio_token == BLANK == blank_of(ConfigReader(whole, ""))
    (folder / "config.json").write_text(json.dumps(whole))  # as the launcher hands it on
    engine = SeeingEngine(folder, longest=1024)
    yield Kimi(folder=folder, reference=reference, engine=engine, spec=spec)
    engine.close()


def test_two_streams_of_one_prompt_and_company(kimi: Kimi) -> None:
    """Sounds of uneven lengths with text between, in chunks too; beside text alone, and again from the cache.
    REG-052."""
    sounds = [sound(0.731), sound(0.29)]
    turn = [
        SPECIAL["<|im_kimia_user_msg_start|>"],
        5,
        6,
        BLANK,
        7,
        BLANK,
        SPECIAL["<|im_msg_end|>"],
    ]
    prompt = kimi.ready(turn, sounds)
    assert len(prompt.ids) == len(turn) - 2 + 10 + 4
    expected = kimi.expected(prompt, sounds, 2)
    for cut in (256, 5):
        engine = kimi.engine.with_steps(kimi.folder, max_step_tokens=cut)
        compare_answers(engine.run(prompt, max_tokens=2)[0], expected)
    text = Ready(list(range(11)) * 3, ())
    engine = kimi.engine.with_steps(kimi.folder)
    for _ in range(2):  # the second time the prefix is there
        first, second = engine.run(prompt, text, max_tokens=2, scored=False)
        assert first.tokens == expected.tokens
        assert second.tokens == kimi.expected(text, [], 2).tokens
    assert first.num_cached and second.num_cached


@pytest.mark.slow
def test_sound_of_more_than_a_window(kimi: Kimi) -> None:
    sounds = [sound(30.4)]
    prompt = kimi.ready([SPECIAL["<|im_media_begin|>"], BLANK, 7], sounds)
    assert len(prompt.ids) == 2 + 375 + 5
    compare_answers(kimi.engine.run(prompt, max_tokens=1)[0], kimi.expected(prompt, sounds, 1))


def test_messages_stand_as_the_package_puts_them(tmp_path: Path) -> None:
    """Its tokenizer is a file of ranks; the special tokens stand behind them in the package's order."""
    ranks = "\n".join(f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256))
    (tmp_path / "tiktoken.model").write_text(ranks)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = load_tokenizer(str(tmp_path), chat_template=CHAT_TEMPLATE)
    named = special_tokens(256)
    assert named["<|im_media_begin|>"] == 256 + 18 and len(named) == 421
    template = ChatTemplate(CHAT_TEMPLATE, tokenizer)
    heard = {"role": "user", "content": [{"type": "text", "text": "Hi"}, MediaMark("audio")]}
    said = {"role": "assistant", "content": "a"}
    asked = {"role": "user", "content": "b"}
    ids = template.render([heard, said, asked], add_generation_prompt=True)
    expected = [
        *("<|im_kimia_user_msg_start|>", "H", "i", "<|im_media_begin|>", "<|im_kimia_text_blank|>"),
        *("<|im_media_end|>", "<|im_kimia_speech_ct_id|>", "<|im_msg_end|>"),
        *("<|im_kimia_assistant_msg_start|>", "a", "<|im_kimia_text_eos|>", "<|im_msg_end|>"),
        *("<|im_kimia_user_msg_start|>", "b", "<|im_msg_end|>"),
        "<|im_kimia_assistant_msg_start|>",
    ]
    assert ids == [named.get(one) or ord(one) for one in expected]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    with pytest.raises(CheckpointError, match="how it cuts text is not known"):
        load_tokenizer(str(tmp_path))


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"whisper-large-v3/config\.json is missing"):
        read_config(tmp_path)
    sizes = {
        "config.json": 1,
        "model-00001-of-00001.safetensors": 1,
        "whisper-large-v3/config.json": 1,
        "whisper-large-v3/model.safetensors": 1,
        "vocoder/model.pt": 1,
    }
    assert wanted_files(sizes, "", model="kimi") == sorted(set(sizes) - {"vocoder/model.pt"})
