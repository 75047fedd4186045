"""MiniCPM-V 2.6, 4.0 and 4.5, which transformers has no class for, against an independent reference around the
decoder that it does have: slices, placeholders, answers; its versions (MOD-04)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace.base.errors import CheckpointError
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.pictures import picture
from tests.models.media import Answer, SeeingEngine, compare_answers
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.test_pictures import BEFORE, BEHIND, BETWEEN, Ready, _digest_of
from tests.models.test_towers import TEXT, TOWER
from tests.references import minicpmv

IMAGE = 100
QUERIES = 5
MARKS = {
    **{"<unk>": IMAGE, "<image>": 102, "</image>": 103, "<slice>": 104, "</slice>": 105},
    **{"<image_id>": 106, "</image_id>": 107},
}
FILES = {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4, "norm_mean": [0.5] * 3}
VERSIONS = {"2.6": "Qwen2", "4.0": "Llama", "4.5": "Qwen3"}
SIZES = ((40, 24), (70, 90), (9, 30))


def ids_of(words: str) -> list[int]:
    ids: list[int] = []
    known = {**MARKS, "I": IMAGE}
    while words:
        mark = next((each for each in known if words.startswith(each)), words[0])
        ids.append(known.get(mark, 20 + ord(mark[0]) % 70))
        words = words[len(mark) :]
    return ids


def whole_config(version: str) -> dict[str, Any]:
    text = {**TEXT, "hidden_size": 128, "head_dim": 32}
    return {
        **text,
        **{"architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": float(version)},
        **{"query_num": QUERIES, "use_image_id": True, "drop_vision_last_layer": False},
        **{"vision_config": TOWER, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
    }


class Reference(torch.nn.Module):
    def __init__(self, config: dict[str, Any], decoder: str) -> None:
        super().__init__()
        keys = {key: config[key] for key in (*TEXT, "rms_norm_eps", "tie_word_embeddings")}
        settings = getattr(transformers, f"{decoder}Config")(**keys)
        settings._attn_implementation = "eager"
        self.llm = getattr(transformers, f"{decoder}ForCausalLM")(settings)
        self.vpm = minicpmv.Tower(config["vision_config"])
        width = config["hidden_size"]
        self.resampler = minicpmv.Resampler(QUERIES, width, TOWER["hidden_size"], width // 128)

    def answer(self, ids: list[int], squares: list[Any], max_tokens: int) -> Answer:
        """Without a cache, each token by the whole text."""
        ids, count, logprobs = list(ids), len(ids), torch.empty(0)
        seen = [self.resampler(self.vpm(minicpmv.pixels_of(one))) for one in squares]
        for _ in range(max_tokens):
            embedded = self.llm.get_input_embeddings()(torch.tensor(ids))
            embedded[torch.tensor(ids[:count] + [0] * (len(ids) - count)) == IMAGE] = torch.cat(
                seen
            )
            logprobs = self.llm(inputs_embeds=embedded[None]).logits[0].log_softmax(-1)
            ids.append(int(logprobs[-1].argmax()))
        rows = list(logprobs.detach().numpy())
        return Answer(
            tokens=ids[count:], prompt_logprobs=rows[: count - 1], logprobs=rows[count - 1 :]
        )


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILES, "norm_std": [0.5] * 3}))
    added = [{"id": id, "content": mark} for mark, id in MARKS.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


@pytest.mark.parametrize(
    "version",
    [
        version if version == "4.5" else pytest.param(version, marks=pytest.mark.slow)
        for version in VERSIONS
    ],
)
@torch.inference_mode()
def test_pictures_are_seen_as_by_the_reference(version: str, tmp_path: Path) -> None:
    config = whole_config(version)
    torch.manual_seed(3)
    reference = Reference(config, VERSIONS[version]).eval()
    randomize(reference)
    stored = {name: one.contiguous() for name, one in reference.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, config)
    spec = read_media(tmp_path, config)
    assert spec is not None and spec.written == {"image": "<unk>"} and spec.image_token == IMAGE
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    rows = [minicpmv.slices(one, 32, 4, 4) for one in pictures]
    media = [processor.image(one) for one in pictures]
    theirs = [np.asarray(one) for each in rows for row in each for one in row]
    ours = [one for medium in media for one in medium.inputs]
    for one, square in zip(ours, theirs, strict=True):
        _, h, w = one.grid
        mine = one.rows.reshape(h, w, 3, 4, 4).transpose(0, 3, 1, 4, 2).reshape(h * 4, w * 4, 3)
        assert np.array_equal(mine, square)
    prepared = [_prepared(one, "image", _digest_of(one), 0, 1) for one in media]
    prompt = [*BEFORE, IMAGE, *BETWEEN, IMAGE, *BETWEEN, IMAGE, *BEHIND]
    ids, inputs = expanded(prompt, prepared, spec, ids_of, field="prompt")
    first, second, third = (ids_of(minicpmv.text_of(i, one, QUERIES)) for i, one in enumerate(rows))
    assert ids == [*BEFORE, *first, *BETWEEN, *second, *BETWEEN, *third, *BEHIND]
    squares = [one for each in rows for row in each for one in row]
    expected = reference.answer(ids, squares, 4)
    engine = SeeingEngine(tmp_path)
    ready = Ready(ids, inputs)
    compare_answers(engine.run(ready, max_tokens=4)[0], expected)
    compare_answers(
        engine.with_steps(tmp_path, max_step_tokens=7).run(ready, max_tokens=4)[0], expected
    )
    again = engine.with_steps(tmp_path, max_step_tokens=64)
    for hit in (0, (len(ids) - 1) // 8 * 8):
        plain = Ready(list(range(3, 30)), ())
        answer, _ = again.run(ready, plain, max_tokens=4, scored=False)
        assert (answer.tokens, answer.num_cached) == (expected.tokens, hit)
    engine.close()


@pytest.mark.parametrize("version", [2.5, "3", None, "next"])
def test_versions_that_are_not_served_are_named(version: Any, tmp_path: Path) -> None:
    """MOD-04. REG-053."""
    config = {**whole_config("4.5"), "version": version}
    if version is None:
        del config["version"]
    write_config(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"version .* 2\.6, 4\.0, 4\.5"):
        load_ours(model_spec(tmp_path))
