"""Quantizing while loading never holds more than the packed model and one plain layer (PLT-09,
QNT-09): the memory of a process that loads, sampled every half millisecond."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.models.oracle import save_oracle

MB = 1 << 20
SLACK = 12 * MB
"""Buffers, allocators and threads; the plain model is 150 MB."""
HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2304, 10, 4096
LAYER_BYTES = 2 * HIDDEN * (4 * HIDDEN + 3 * INNER)


def config(layers, **sizes):
    return transformers.Qwen3Config(
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        tie_word_embeddings=True,
        **sizes,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = []
    for sizes in (
        {"layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128},
        {
            "layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "vocab_size": VOCABULARY,
        },
    ):
        made.append(tmp_path_factory.mktemp("checkpoint"))
        save_oracle(config(**sizes), made[-1])
        weights = transformers.AutoModelForCausalLM.from_pretrained(made[-1], dtype="bfloat16")
        weights.save_pretrained(made[-1])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4", "int4-asym-g128", "mxfp4"])
@pytest.mark.parametrize("kind", ["safetensors", "dummy"])
def test_the_peak_is_the_packed_model_and_one_layer(folders, kind, quantization):
    command = [sys.executable, "-m", "tests.back.quant.loading_memory", *map(str, folders)]
    done = subprocess.run(
        [*command, kind, quantization],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    plain = LAYERS * LAYER_BYTES + 2 * HIDDEN * VOCABULARY
    allowed = facts["weights"] + LAYER_BYTES + SLACK
    assert allowed < 0.75 * plain, "the bound says nothing"
    assert 0.9 * facts["weights"] < facts["peak"] <= allowed, {k: v / MB for k, v in facts.items()}
