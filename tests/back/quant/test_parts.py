"""Parts of a model that differ from the rest (--quantization-config). QNT-07, QNT-08, QNT-09, QNT-17."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from headrace.back.kernels.linear_fp8.layout import dequantize
from headrace.back.kernels.linear_int4 import layout as int4
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.platforms.detect import FAKES
from headrace.back.quant.gpu import HELD_AS, quantize_weight
from headrace.back.quant.gpu_int4 import quantize_int4
from headrace.back.quant.scheme import ONLINE_SCHEMES, SCHEMES
from headrace.base.config.quantization_options import QuantizationParts
from headrace.base.errors import ConfigError
from headrace.launch.plan import kernels_on_absent_device
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

ROWS = [list(range(3, 30)), [5, 1, 2]]


def load(folder: Path, parts: dict[str, Any] | None = None, scheme: str | None = None) -> Any:
    named = None if parts is None else QuantizationParts(**parts)
    return load_model(
        replace(model_spec(folder), quantization=scheme, quantization_parts=named),
        mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


def logits(folder: Path, *changes: Any) -> torch.Tensor:
    model = load(folder, *changes)[0]
    return torch.cat(teacher_forced(model, ROWS, block_tokens=BLOCK_TOKENS, dtype=torch.float32))


def write_rounded(folder: Path, scheme: str, *, of: str = "") -> None:
    """The checkpoint with what a scheme keeps of every matrix that is named so, each projection
    for itself, as if its part of a merged one."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        matrices = tensor.dim() >= 2 and "embed_tokens" not in name and of in name
        if matrices and "router" not in name and not name.endswith("mlp.gate.weight"):
            for matrix in tensor if tensor.dim() == 3 else tensor[None]:
                made = ONLINE_SCHEMES[scheme]
                matrix.copy_(made.dequantize(made.quantize(matrix)))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp8", "nvfp4"])
def test_a_cpu_computes_with_what_a_scheme_keeps(scheme: str, tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.tie_word_embeddings = False
    save_oracle(config, tmp_path)
    params = load(tmp_path, None, scheme)[0].weights.params
    assert {len(one.shape) for one in params if one.packed_bytes} == {2}
    plain, ours = logits(tmp_path), logits(tmp_path, None, scheme)
    assert not torch.equal(plain, ours)
    write_rounded(tmp_path, scheme)
    exact = logits(tmp_path)
    # Scales of blocks and the outer scale of nvfp4 are those of merged projections, so that some numbers
    # differ; nvfp4 rounds activations to int8 as well.
    bound = {"mxfp8": 1e-5, "fp8-block": 0.1, "nvfp4": 0.2}[scheme]
    assert (ours - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_experts_may_be_quantized_alone(family: str, tmp_path: Path) -> None:
    """With their biases, which gpt-oss has (QNT-08), and not the linear layers."""
    save_oracle(tiny_config(family), tmp_path)
    ours, plain = logits(tmp_path, {"moe": "mxfp8"}), logits(tmp_path)
    assert not torch.equal(ours, plain)
    if family == "qwen3-moe":
        write_rounded(tmp_path, "mxfp8", of="experts")
        exact = logits(tmp_path)
        assert (ours - exact).norm() / exact.norm() < 1e-5
    packed = load(tmp_path, {"moe": "fp8"})[0].weights.params
    assert {"experts" in one.name for one in packed if one.packed_bytes} == {True}


def test_modules_that_are_ignored_stay_plain_and_the_head_may(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.tie_word_embeddings = False
    save_oracle(config, tmp_path)
    parts = {"head": "none", "ignore": ("model.layers.0.self_attn", "model.layers.*.mlp")}
    params = load(tmp_path, parts, "int8")[0].weights.params
    packed = {piece.name for one in params if one.packed_bytes for piece in one.pieces}
    assert packed == {
        f"model.layers.{i}.self_attn.{name}_proj.weight"
        for i in range(1, config.num_hidden_layers)
        for name in "qkvo"
    }


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ignore": ("model.layers.9",)}, r"'model\.layers\.9', which no weight of the model fits"),
        ({"ignore": ("q_proj",)}, r"leaves .*q_proj\.weight plain but not .*k_proj\.weight"),
        ({"moe": "fp8"}, "moe is fp8, but the model has no routed experts"),
    ],
)
def test_what_fits_nothing_is_refused(parts: Any, message: str, tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, parts, "int8")


@pytest.mark.parametrize("scheme", sorted({*ONLINE_SCHEMES, "fp8"} - set(SCHEMES) | {"fp8"}))
def test_a_gpu_keeps_the_numbers_of_the_scheme(scheme: str) -> None:
    made = ONLINE_SCHEMES[scheme]
    weight = torch.randn(200, 320, generator=torch.Generator().manual_seed(2))
    expected = made.dequantize(made.quantize(weight))
    if scheme in HELD_AS:
        ours = dequantize(quantize_weight(weight, made))
    else:
        ours = int4.dequantize(quantize_int4(weight, made), torch.float32)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parts", "kernels"),
    [
        ({"linear": "fp8-block", "moe": "nvfp4"}, {"linear_fp8", "experts_int4"}),
        ({"linear": "mxfp8", "moe": "fp8-tensor"}, {"linear_fp8", "experts_fp8"}),
        ({"linear": "int8", "moe": "mxfp8"}, {"linear_int8", "experts_bytes"}),
        ({"linear": "none", "moe": "int8-g64"}, {"experts_bytes"}),
        ({"linear": "nvfp4", "moe": "none"}, {"linear_int4", "experts"}),
        ({"linear": "none", "moe": "fp8-block", "head": "fp8"}, {"linear_fp8", "experts_fp8"}),
    ],
)
def test_a_gpu_has_kernels_for_each_part(parts: Any, kernels: set[str], tmp_path: Path) -> None:
    config = tiny_config("qwen3-moe")
    config.hidden_size, config.intermediate_size = 64, 128
    config.moe_intermediate_size, config.head_dim = 64, 16
    config.tie_word_embeddings = False
    save_oracle(config, tmp_path)
    named = QuantizationParts(**parts)
    spec = replace(model_spec(tmp_path), dtype="bfloat16", quantization_parts=named)
    decided = kernels_on_absent_device(spec, FAKES["h200"], block_tokens=16)
    found = {one.field.removeprefix("kernel."): one.chosen for one in decided}
    assert kernels <= found.keys(), found
    assert all(found[kernel] == "triton" for kernel in kernels - {"experts"}), found
    others = {"linear_fp8", "linear_int4", "linear_int8", "experts_fp8"} - kernels
    others |= {"experts_int4", "experts_bytes"} - kernels
    assert not others & found.keys()


def test_a_gpu_quantizes_no_embedding(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    for part in ("embedding", "head"):  # which is tied
        config = tiny_config("qwen3")
        config.tie_word_embeddings = part == "head"
        save_oracle(config, tmp_path)
        named = QuantizationParts(**{part: "fp8"})
        spec = replace(model_spec(tmp_path), dtype="bfloat16", quantization_parts=named)
        with pytest.raises(ConfigError, match=f"{part} is fp8, but .*embed_tokens.* is a table"):
            kernels_on_absent_device(spec, FAKES["h200"], block_tokens=16)
