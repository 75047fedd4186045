"""MiniCPM-o 2.6 and 4.5 hear and see as an independent reference does around the decoder that transformers has: text
around each second, parts of half a minute, answers (MOD-04)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.base.errors import CheckpointError
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processors.families import PROCESSORS, read_media
from headrace.front.media.processors.spectrogram import spectrogram
from tests.front.media.pictures import picture
from tests.front.media.test_log_mel import sound
from tests.models import test_minicpmv as seeing
from tests.models.media import Answer, SeeingEngine, compare_answers
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.test_pictures import Ready
from tests.references import minicpmo, minicpmv

AUDIO = {
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128},
    **{"num_mel_bins": 16, "max_source_positions": 1500, "activation_function": "gelu"},
}
HEARD = 110
MARKS = {"<|audio_start|>": 108, "<|audio_end|>": 109, "<|audio|>": HEARD}
VERSIONS = {"2.6": ("Qwen2", 2), "4.5": ("Qwen3", 5)}


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    known = {**seeing.MARKS, "I": seeing.IMAGE, **MARKS, "[": 108, "]": 109, "A": HEARD}
    while text:
        mark = next((each for each in known if text.startswith(each)), "")
        ids += [known[mark]] if mark else seeing.ids_of(text[:1])
        text = text[len(mark) or 1 :]
    return ids


def config_of(version: str) -> dict[str, Any]:
    config = seeing.whole_config(version)
    return {
        **config,
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "audio_config": AUDIO,
    }


def write_files(folder: Path, config: dict[str, Any]) -> None:
    seeing.write_config(folder, config)
    marks = {**seeing.MARKS, **MARKS}
    added = [{"id": id, "content": mark} for mark, id in marks.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


class Reference(seeing.Reference):
    def __init__(self, config: dict[str, Any], decoder: str) -> None:
        super().__init__(config, decoder)
        self.apm = minicpmo.Encoder(AUDIO)
        self.audio_projection_layer = minicpmo.Projector(32, config["hidden_size"])

    def hear(self, samples: np.ndarray, means: int) -> torch.Tensor:
        parts = [self.apm(one, 50) for one in minicpmo.parts_of(samples, 16)]
        return torch.cat([self.audio_projection_layer(one, means) for one in parts])

    def answer_to(self, ids: list[int], heard: torch.Tensor, seen: torch.Tensor) -> Answer:
        embedded = self.llm.get_input_embeddings()(torch.tensor(ids))
        embedded[torch.tensor(ids) == HEARD] = heard
        embedded[torch.tensor(ids) == seeing.IMAGE] = seen
        rows = list(self.llm(inputs_embeds=embedded[None]).logits[0].log_softmax(-1).numpy())
        first = int(rows[-1].argmax())
        return Answer(tokens=[first], prompt_logprobs=rows[:-1], logprobs=rows[-1:])


@pytest.mark.parametrize(
    ("version", "seconds"),
    [
        ("4.5", 1.37),
        *(pytest.param(v, s, marks=pytest.mark.slow) for v in VERSIONS for s in (2.61, 31.3)),
    ],
)
@torch.inference_mode()
def test_sounds_are_heard_as_by_the_reference(version: str, seconds: float, tmp_path: Path) -> None:
    config, (decoder, means) = config_of(version), VERSIONS[version]
    torch.manual_seed(3)
    reference = Reference(config, decoder).eval()
    randomize(reference)
    save_file(
        {name: one.contiguous() for name, one in reference.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    write_files(tmp_path, config)
    spec = read_media(tmp_path, config)
    assert spec is not None and spec.audio_token == HEARD and spec.written["audio"] == "<|audio|>"
    samples, seen = sound(seconds), picture(16, 12, 1)
    (square,) = minicpmv.slices(seen, 32, 4, 4)[0]
    processed = PROCESSORS.load(spec.processor)(spec.settings).image(seen)
    media = [
        _prepared(spectrogram(samples, spec.settings), "audio", b"s" * 32, 0, 1),
        _prepared(processed, "image", b"i" * 32, 0, 1),
    ]
    ids, inputs = expanded([5, HEARD, 6, seeing.IMAGE, 7], media, spec, ids_of, field="prompt")
    text = minicpmv.text_of(0, [[square]], seeing.QUERIES)
    stands = ids_of(minicpmo.text_of(len(samples), means))
    assert ids == [5, *stands, 6, *seeing.ids_of(text), 7]
    again, _ = expanded(ids, media, spec, ids_of, field="prompt")
    assert again == ids
    pixels = reference.resampler(reference.vpm(minicpmv.pixels_of(square)))
    expected = reference.answer_to(ids, reference.hear(samples, means), pixels)
    engine = SeeingEngine(tmp_path, longest=2048)
    try:
        for cut in (256, 7):
            run = engine.with_steps(tmp_path, max_step_tokens=cut)
            compare_answers(run.run(Ready(ids, inputs), max_tokens=1)[0], expected)
    finally:
        engine.close()


@pytest.mark.parametrize("version", ["4.0", None, "next"])
def test_versions_that_are_not_served_are_named(version: Any, tmp_path: Path) -> None:
    """MOD-04. REG-053."""
    config = {**config_of("4.5"), "version": version}
    write_files(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"version .* 2\.6, 4\.5"):
        load_ours(model_spec(tmp_path))
