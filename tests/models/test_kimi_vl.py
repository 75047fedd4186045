"""Kimi-VL, which transformers has no class for: its tower is Kimi-K2.5's with one frame, its checkpoints have names of
their own. The same weights under both give the same answers, which are those of transformers' Kimi-K2.5."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.pictures import picture
from tests.models.media import SeeingEngine, answer_of, compare_answers, save_media_oracle
from tests.models.picture_cases import CASES, IMAGE
from tests.models.test_pictures import Shown, given_of, rename

NAMES = (
    (r"^mm_projector\.proj\.0\.", "multi_modal_projector.linear_1."),
    (r"^mm_projector\.proj\.2\.", "multi_modal_projector.linear_2."),
    (r"^mm_projector\.", "multi_modal_projector."),
)


def test_pictures_are_seen_as_by_kimi_k25(tmp_path: Path) -> None:
    case = CASES["kimi-k25"]
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    file = tmp_path / "model.safetensors"
    rename(file, case)
    stored = {}
    for name, tensor in load_file(file).items():
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        stored[name] = tensor
    save_file(stored, file)
    keys = json.loads((tmp_path / "config.json").read_text())
    vision = keys["vision_config"] | {"model_type": "moonvit"}
    for side in ("height", "width"):
        vision[f"init_pos_emb_{side}"] = vision.pop(f"pos_emb_{side}")
    keys |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    keys |= {"vision_config": vision, "media_placeholder_token_id": IMAGE}
    for key in ("image_token_id", "video_token_id", "projection_hidden_size"):
        keys.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"in_token_limit": 40, "pad_input": True})
    )
    spec = read_media(tmp_path, keys)
    assert spec is not None and spec.image_token == IMAGE and spec.video_token is None
    engine = SeeingEngine(tmp_path)
    shown = Shown(case=case, folder=tmp_path, oracle=oracle, engine=engine, spec=spec)
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    pictures = [picture(*size, seed) for seed, size in enumerate(((40, 24), (17, 30)))]
    media = [processor.image(one) for one in pictures]
    prompt, theirs = shown.prompt(media), case.process(pictures, media)
    assert prompt.ids == shown.expected_ids(theirs)
    expected = answer_of(oracle, prompt, given_of(prompt, theirs), 4)
    compare_answers(engine.run(prompt, max_tokens=4)[0], expected)
    cut = engine.with_steps(tmp_path, max_step_tokens=7)
    compare_answers(cut.run(prompt, max_tokens=4)[0], expected)
    engine.close()
