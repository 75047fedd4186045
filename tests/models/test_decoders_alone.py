"""Decoders of encoder-decoders as language models, against transformers (MOD-17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.back.models.bart_decoder import FORMS
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, randomize
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_encoder_decoders import bart_like, whisper
from tests.models.test_parity import compare

MORE: dict[str, dict[str, Any]] = {
    "BigBirdPegasusForCausalLM": {"use_bias": False},
    "MarianForCausalLM": {"scale_embedding": True},
    "PegasusForCausalLM": {"scale_embedding": True},
    "TrOCRForCausalLM": {"scale_embedding": True, "cross_attention_hidden_size": 24},
}
OF_GATE = ("BartForCausalLM", "BlenderbotSmallForCausalLM", "PegasusForCausalLM")
"""The others differ from one of these by a norm's place, a table of positions or a name."""


def config_of(name: str) -> Any:
    if name == "WhisperForCausalLM":
        return whisper()
    kind = getattr(transformers, f"{name.removesuffix('ForCausalLM')}Config")
    return bart_like(kind, encoder_layers=3, **MORE.get(name, {}))


@pytest.mark.parametrize(
    "name",
    [n if n in OF_GATE else pytest.param(n, marks=pytest.mark.slow) for n in FORMS],
)
def test_a_decoder_alone_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = getattr(transformers, name)(config_of(name)).eval()
    randomize(model, seed=3)
    for module in model.modules():
        if hasattr(module, "create_weight"):  # sines and cosines
            module.weight.data.copy_(module.create_weight())
    model.save_pretrained(tmp_path)
    facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert (facts.family, facts.num_layers, facts.encoder_tokens) == ("bart_decoder", 3, 0)
    rows = random_rows(97, (33, 22, 9))
    ours = load_ours(model_spec(tmp_path, max_model_len=64))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(model, rows), 1e-4)
