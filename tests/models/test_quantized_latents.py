"""Latent attention with a quantized kv_b_proj: what it is multiplied into is what its numbers stand for, in steps that
read cached latents too; and no layer but the linear ones looks at a module's weight. QNT-10, REG-059."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.gpu_int4 import e2m1_bits
from headrace.back.quant.scheme import ONLINE_SCHEMES
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
LAYERS = Path(__file__).resolve().parents[2] / "headrace" / "back" / "layers"


def fp8(weight: torch.Tensor) -> Stored:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def nvfp4(weight: torch.Tensor) -> Stored:
    scheme = ONLINE_SCHEMES["nvfp4"]
    doubled, halves, _ = scheme.quantize(weight)
    outer = weight.abs().max() / (6 * 448)
    bits = e2m1_bits(doubled)
    stored = {
        "weight": bits[:, ::2] | bits[:, 1::2] << 4,
        "weight_scale": (2 * halves / outer).to(torch.float8_e4m3fn),
        "weight_scale_2": outer,
    }
    return stored, scheme.dequantize((doubled, halves, None))


def int4(weight: torch.Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, 16))
    scales = groups.abs().amax(2) / 7
    values = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    stored = {
        "weight": ((values[::2] & 15) | (values[1::2] & 15) << 4).view(torch.uint8),
        "weight_scale": scales,
    }
    return stored, values * scales.repeat_interleave(16, 1)


FORMATS = {
    "FP8": (fp8, {}),
    "NVFP4": (nvfp4, {"group_size": 16}),
    "W4A16_AWQ": (int4, {"group_size": 16}),
}


@pytest.mark.parametrize("algorithm", FORMATS)
def test_a_quantized_up_projection_of_latents_is_what_it_stands_for(
    algorithm: str, tmp_path: Path
) -> None:
    stored_folder, plain_folder = tmp_path / "stored", tmp_path / "plain"
    quantize, entry = FORMATS[algorithm]
    layers: dict[str, dict[str, object]] = {}
    for folder in (stored_folder, plain_folder):
        folder.mkdir()
        config = tiny_config("deepseek-v3")
        config.kv_lora_rank = 32
        save_oracle(config, folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
            members, weight = quantize(tensors[name].float())
            module = name.removesuffix(".weight")
            layers[module] = {"quant_algo": algorithm, **entry}
            if folder == plain_folder:
                tensors[name] = weight.contiguous()
                continue
            del tensors[name]
            tensors |= {f"{module}.{leaf}": one.contiguous() for leaf, one in members.items()}
        save_file(tensors, folder / "model.safetensors")
    file = stored_folder / "config.json"
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    quantization |= {"quantized_layers": layers}
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )
    found = [
        torch.cat(
            teacher_forced(
                load_model(
                    model_spec(folder),
                    mesh=Mesh(),
                    device=torch.device("cpu"),
                    block_tokens=BLOCK_TOKENS,
                )[0],
                [list(range(3, 40)), [5, 1, 2]],
                block_tokens=BLOCK_TOKENS,
                dtype=torch.float32,
            )
        )
        for folder in (stored_folder, plain_folder)
    ]
    assert len(layers) == tiny_config("deepseek-v3").num_hidden_layers
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_no_layer_reads_the_weight_of_a_linear_module() -> None:
    """`x.weight` is read by the classes that hold one, of themselves alone: a packed weight has none."""
    wrong = []
    for path in LAYERS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                owner = (
                    node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
                )
                if "proj" in owner or "linear" in owner.lower():
                    wrong.append(f"{path.name}:{node.lineno} {owner}.weight")
    assert wrong == []
