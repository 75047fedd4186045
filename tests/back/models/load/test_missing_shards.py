"""A shard that the index names and the folder lacks ends the load before a weight is read, whatever the weights'
format. QNT-12, REG-060."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.test_parity import tiny_config

FORMATS: dict[str, Any] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_shard_is_named(format: str, tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("qwen3"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    oracle.save_pretrained(tmp_path, max_shard_size="20KB")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    if FORMATS[format] is not None:
        file.write_text(json.dumps(config | {"quantization_config": FORMATS[format]}))
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_model(
            model_spec(tmp_path), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
        )
