"""CogVLM and CogVLM2 (MOD-02), which transformers has no class for, against an independent reference: tokens of images
by weights of their own, all patches at one position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from headrace.base.errors import CheckpointError
from tests.front.media.pictures import picture
from tests.models.media import SeeingEngine
from tests.models.oracle import load_ours, model_spec, randomize
from tests.models.sight import agree, processed, prompt_of, read_spec, write_checkpoint
from tests.models.test_towers import CLIP
from tests.references import cogvlm

PAD, BEGIN = 90, 1
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40},
    **{"image_size": 16, "patch_size": 4, "num_positions": 17, "layer_norm_eps": 1e-6},
    **{"hidden_act": "gelu", "dropout_prob": 0.0, "in_channels": 3},
}
FIRST: dict[str, Any] = {
    **{"architectures": ["CogVLMForCausalLM"], "vocab_size": 97, "hidden_size": 48},
    **{"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"rms_norm_eps": 1e-5, "pad_token_id": PAD, "bos_token_id": BEGIN, "hidden_act": "silu"},
    **{"max_position_embeddings": 512, "template_version": "chat", "vision_config": VISION},
}
SECOND = {**FIRST, "num_multi_query_heads": 2}
VERSIONS = {"first": FIRST, "second": SECOND}


def checkpoint(folder: Path, config: dict[str, Any]) -> cogvlm.CogVLM:
    torch.manual_seed(5)
    reference = cogvlm.CogVLM(config).eval()
    randomize(reference)
    write_checkpoint(folder, reference.state_dict(), config)
    return reference


def rows_of(reference: cogvlm.CogVLM, one: Image.Image) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in CLIP)
    square = one.resize((16, 16), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(16, 16, 3)
    with torch.inference_mode():
        rows: torch.Tensor = reference.model["vision"](
            (values.permute(2, 0, 1).float() / 255 - mean) / std
        )
    return rows


@pytest.mark.parametrize("version", ["second", pytest.param("first", marks=pytest.mark.slow)])
def test_a_picture_is_seen_as_by_the_reference(version: str, tmp_path: Path) -> None:
    """In a chunk of its own, the picture's last token, which counts as text, is cut off from its others."""
    reference = checkpoint(tmp_path, VERSIONS[version])
    one = picture(30, 17, 3)
    for step_tokens in (4, 8) if version == "second" else (7,):
        agree(
            tmp_path,
            reference,
            [one],
            rows_of(reference, one),
            decode=reference.logits,
            step_tokens=step_tokens,
        )


@pytest.mark.slow
def test_beside_text_each_token_has_the_weights_of_its_kind(tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, SECOND)
    spec = read_spec(tmp_path)
    assert spec.ahead == (BEGIN,) and spec.most == {"image": 1}
    prompt = prompt_of(spec, processed(spec, [picture(30, 17, 3)]))
    plain = type(prompt)(list(range(3, 30)), ())
    engine = SeeingEngine(tmp_path)
    alone = [engine.run(one)[0].tokens for one in (prompt, plain)]
    both = engine.run(prompt, plain, salt="together")
    assert [one.tokens for one in both] == alone
    ids = torch.tensor([plain.ids])
    with torch.inference_mode():
        logits = reference.logits(ids, reference.get_input_embeddings()(ids))
    assert alone[1][0] == int(logits[0, -1].argmax())
    engine.close()


def test_a_table_of_other_positions_is_refused_by_key(tmp_path: Path) -> None:
    checkpoint(tmp_path, {**SECOND, "vision_config": {**VISION, "num_positions": 20}})
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == "num_positions"
