"""Experts of a mixture as GPUs keep them: the numbers, and a model made of them by the definition of the kernels' ops,
which a CPU takes. QNT-09, KRN-17."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

import headrace.back.models.load as loading
from headrace.back.kernels.experts_bytes.layout import ByteExperts
from headrace.back.kernels.experts_fp8 import op as experts_fp8
from headrace.back.kernels.experts_fp8.layout import Fp8Experts
from headrace.back.kernels.experts_int4.layout import Int4Experts
from headrace.back.kernels.linear_int4.layout import dequantize
from headrace.back.layers.scope import Scope
from headrace.back.models.load import load_model
from headrace.back.models.load.fill import _matrices as each_matrix
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Copy, Param, WeightPiece, copies
from headrace.back.parallel.shard import Part, Shard, Span
from headrace.back.platforms.detect import FAKES
from headrace.back.quant.activations import AS_THEY_ARE, inputs_of
from headrace.back.quant.experts import MatricesOf
from headrace.back.quant.formats.groups import Groups
from headrace.back.quant.gpu_expert_forms import MixtureSizes, kept_of
from headrace.back.quant.gpu_experts import OnlineGpuExperts, StoredGpuExperts, stored_on_gpu
from headrace.back.quant.gpu_int4 import check_scales
from headrace.back.quant.scheme import ONLINE_SCHEMES
from headrace.base.config.levels import LEVELS
from headrace.base.config.quantization import Numbers
from headrace.base.errors import CheckpointError
from headrace.launch.plan import (
    build_without_memory,
    cost_of,
    kernels_on_absent_device,
    stored_on_absent_device,
)
from tests.back.quant.formats.stored_weights import open_weight
from tests.back.quant.test_gpu import FORMATS as FP8_FORMATS
from tests.back.quant.test_gpu_int4 import FORMATS as INT4_FORMATS
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
ROWS = [list(range(3, 30)), [5, 1, 2]]


def fp8_members(format: str) -> Callable[[torch.Tensor], Stored]:
    """Members of a matrix, and what they stand for."""
    quantize, leaf, _, _ = FP8_FORMATS[format]

    def members(weight: torch.Tensor) -> Stored:
        values, scales, plain = quantize(weight)
        return {"weight": values, leaf: scales}, plain

    return members


def int4_members(format: str) -> Callable[[torch.Tensor], Stored]:
    """The same of 4-bit integers."""
    quantize, symmetric, group, _, _ = INT4_FORMATS[format]
    return lambda weight: quantize(weight, group, symmetric=symmetric)


def int8_members(weight: torch.Tensor) -> Stored:
    """The same of int8 with a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values * scales


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
CHECKPOINTS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict[str, Any], str]] = {
    **{
        format: (
            fp8_members(format),
            config,
            "experts_bytes" if format == "micro" else "experts_fp8",
        )
        for format, (_, _, config, _) in FP8_FORMATS.items()
    },
    "int8": (int8_members, INT8, "experts_bytes"),
    **{
        format: (int4_members(format), INT4_FORMATS[format][3], "experts_int4")
        for format in ("gptq-asym", "compressed")
    },
}


def moe_folder(folder: Path, format: str, *, chosen: int = 2) -> Any:
    """A checkpoint whose experts are stored so, of which a token takes `chosen` of 4; the transformers model with the
    weights that are stored."""
    members, quantization, _ = CHECKPOINTS[format]
    config = tiny_config("qwen3-moe")
    config.update({"hidden_size": 128, "moe_intermediate_size": 128, "mlp_only_layers": []})
    config.update({"head_dim": 16, "num_experts": 4, "num_experts_per_tok": chosen})
    oracle = save_oracle(config, folder)
    stored, back = load_file(folder / "model.safetensors"), oracle.state_dict()
    names = {"gate_proj": 0, "up_proj": 1}
    for name in list(stored):
        if ".experts." not in name:
            continue
        module, _, rest = name.partition(".experts.")
        expert, leaf = rest.split(".")[:2]
        found, plain = members(stored.pop(name).float())
        stored |= {name.removesuffix("weight") + part: one for part, one in found.items()}
        merged = back[f"{module}.experts.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"]
        rows = slice(None)
        if leaf in names:
            rows = slice(names[leaf] * len(plain), (names[leaf] + 1) * len(plain))
        merged[int(expert)][rows] = plain
    whole = {name: value.contiguous() for name, value in stored.items()}
    save_file(whole, folder / "model.safetensors")
    oracle.load_state_dict(back)
    write_config(folder, quantization)
    return oracle


def write_config(folder: Path, quantization: dict[str, Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": quantization}))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as CUDA keeps them; all else as a CPU has it, and no activations become e4m3."""

    def packed_experts(
        scope: Scope,
        params: list[Param],
        matrices: list[MatricesOf] | None,
        floats: Callable[[], Any],
        *,
        sizes: tuple[int, int, int],
    ) -> Any:
        return scope._experts_on_gpu(params, matrices, floats, MixtureSizes(*sizes))

    monkeypatch.setattr(Scope, "packed_experts", packed_experts)
    monkeypatch.setattr(Scope, "bind_fused", Scope.bind)
    monkeypatch.setattr(experts_fp8, "QUANTIZED_FROM", 1 << 30)
    monkeypatch.setattr(loading, "unsupported", lambda device, dtype: None)


def logits_of(folder: Path, **changes: Any) -> tuple[list[torch.Tensor], Any]:
    model, report = load_model(
        replace(model_spec(folder), **changes),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    logits = teacher_forced(model, ROWS, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    return logits, report


@pytest.mark.parametrize("format", CHECKPOINTS)
def test_a_mixture_multiplies_by_what_is_stored(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = moe_folder(tmp_path, format)
    as_on_a_gpu(monkeypatch)
    ours, report = logits_of(tmp_path)
    assert f"kernel.{CHECKPOINTS[format][2]}" in {one.field for one in report.decisions}
    for row, expected in zip(ours, oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


def gpt_oss_folder(folder: Path) -> Any:
    """gpt-oss with its experts in MXFP4, as they are published."""
    config = tiny_config("gpt-oss")
    config.update({"hidden_size": 128, "intermediate_size": 96, "head_dim": 16})
    oracle = save_oracle(config, folder)
    stored, back = load_file(folder / "model.safetensors"), oracle.state_dict()
    levels = torch.tensor(LEVELS["e2m1"])
    for name in list(stored):
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            continue
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        bits = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        plain = levels[bits.int()] * torch.exp2(scales.float() - 127)[..., None]
        back[name] = plain.flatten(-2).transpose(1, 2).contiguous()
    save_file({n: v.contiguous() for n, v in stored.items()}, folder / "model.safetensors")
    oracle.load_state_dict(back)
    write_config(folder, {"quant_method": "mxfp4"})
    return oracle


def test_gpt_oss_multiplies_by_its_mxfp4_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, and the activation that is its own."""
    oracle = gpt_oss_folder(tmp_path)
    as_on_a_gpu(monkeypatch)
    ours, report = logits_of(tmp_path)
    assert "kernel.experts_int4" in {one.field for one in report.decisions}
    for row, expected in zip(ours, oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "scheme",
    ["fp8", "int4-asym", "int4-g128", "mxfp4", "int8", "int8-g32", "mxfp8", "fp8-block", "nvfp4"],
)
def test_floats_become_numbers_of_a_scheme(scheme: str) -> None:
    """MixtureSizes that are no whole tiles; what a parameter is said to take is what it takes."""
    kept, sizes = kept_of(scheme), MixtureSizes(3, 192, 80)
    assert kept is not None
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(3, 160, 192, generator=generator)
    down = torch.randn(3, 192, 80, generator=generator)
    experts = OnlineGpuExperts([], lambda: (up, down), kept, sizes).take()
    assert isinstance(experts, Fp8Experts | Int4Experts | ByteExperts)
    for found, plain in zip(experts.floats(torch.float32), (up, down), strict=True):
        for matrix, weight in zip(found, plain, strict=True):
            made, halves = (
                ONLINE_SCHEMES[scheme],
                weight.split(80) if len(weight) == 160 else [weight],
            )
            expected = torch.cat([made.dequantize(made.quantize(half)) for half in halves])
            torch.testing.assert_close(
                matrix, expected, rtol=1e-2 if made.asymmetric else 1e-6, atol=1e-6
            )
    total = 3 * (2 * kept.num_bytes(80, 192, up.dtype) + kept.num_bytes(192, 80, up.dtype))
    assert experts.num_bytes == total


def part_param(name: str, outputs: int, inputs: int) -> Param:
    piece = WeightPiece(name=name, shape=(outputs, inputs))
    tensor = torch.empty(outputs, inputs)
    return Param(
        name=name, shape=(outputs, inputs), dtype=torch.float32, pieces=(piece,), tensor=tensor
    )


def test_what_no_kernel_keeps_stays_floats() -> None:
    sizes = MixtureSizes(1, 128, 64)
    gate_up = MatricesOf(param=part_param("up", 128, 128), names=("gate", "up"), size=64)
    down = MatricesOf(param=part_param("down", 128, 64), names=("down",), size=128)
    both = [gate_up, down]
    assert stored_on_gpu(both, {"up": "int4", "down": "int4"}, sizes) == "int4"
    assert stored_on_gpu(both, {"up": "int4", "down": "int4-asym"}, sizes) is None
    assert stored_on_gpu(both, {"up": "int8", "down": "int8"}, sizes) == "int8"
    assert stored_on_gpu(both, {"up": "Q5_K", "down": "Q5_K"}, sizes) is None  # minima
    assert stored_on_gpu(both, {"up": "int4"}, sizes) is None
    assert stored_on_gpu(both, {"up": "fp8", "down": "fp8"}, MixtureSizes(1, 128, 60)) is None


def test_a_scale_too_large_for_the_kernels_is_told() -> None:
    check_scales(torch.tensor([[2.0**17, 1.0]]), "m")
    with pytest.raises(CheckpointError, match="a scale is 262144, above 131072"):
        check_scales(torch.tensor([[2.0**18, 1.0]]), "m")


def test_a_damaged_scale_is_told_by_its_row() -> None:
    gate_up = MatricesOf(param=part_param("up", 128, 128), names=("gate", "up"), size=64)
    experts = StoredGpuExperts(
        [gate_up], "mxfp4", MixtureSizes(1, 128, 64), device=torch.device("cpu")
    )
    scales = torch.ones(128, 4)
    scales[77, 2] = torch.nan
    groups = Groups(values_RC=torch.zeros(128, 128, dtype=torch.uint8), scales_RG=scales)
    whole = slice(0, 128), slice(0, 128)
    copy = Copy(name="up", shape=(128, 128), source=whole, target=whole)
    numbers = Numbers(bits=4, arrangement="mxfp4-packed", group=(1, 32))
    assert gate_up.param.on_groups is not None
    assert gate_up.param.on_groups(copy, groups, numbers) == 77
    assert experts.kind == "mxfp4"


def test_stored_scales_of_inputs_are_the_largest_of_all_experts() -> None:
    """QNT-17. One for tokens, one for inner values; of experts only some of which have one, none."""
    gate_up = MatricesOf(param=part_param("up", 128, 128), names=("gate", "up"), size=64)
    down = MatricesOf(param=part_param("down", 128, 64), names=("down",), size=128)
    sizes, both, name = MixtureSizes(1, 128, 64), [gate_up, down], "fp8+stored-scale"
    assert stored_on_gpu(both, {"up": name, "down": name}, sizes) == name
    assert stored_on_gpu(both, {"up": name, "down": "fp8"}, sizes) == "fp8"
    int8 = "int8+int8-rows+stored-scale"
    assert inputs_of(int8, "cuda", routed=True) == AS_THEY_ARE
    told = "e4m3, the largest stored scale, from 2 tokens of a step on"
    assert inputs_of(name, "cuda", routed=True) == told
    assert stored_on_gpu(both, {"up": int8, "down": int8}, sizes) == "int8"
    experts = StoredGpuExperts(both, name, sizes, device=torch.device("cpu"))
    numbers = Numbers(arrangement="scaled", bits=8, group=(0, 0))

    def give(matrices: MatricesOf, scale: float) -> None:
        (copy,) = copies(matrices.param)
        values = torch.ones(copy.shape).to(torch.float8_e4m3fn)
        inputs = torch.tensor([scale])
        groups = Groups(values_RC=values, scales_RG=torch.ones(1, 1), inputs=inputs)
        assert matrices.param.on_groups is not None
        matrices.param.on_groups(copy, groups, numbers)

    for scale in (0.5, 0.25):
        give(gate_up, scale)
        give(down, 4 * scale)
    with pytest.raises(CheckpointError, match=r"down.*input_scale.*-1\.0.*positive"):
        give(down, -1.0)
    taken = experts.take()
    assert isinstance(taken, Fp8Experts) and taken.inputs_2 is not None
    assert taken.inputs_2.tolist() == [0.5, 2.0]


def test_a_plan_counts_the_bytes_that_a_gpu_keeps(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    gpt_oss_folder(tmp_path)
    spec, device = model_spec(tmp_path, dtype="bfloat16"), FAKES["h200"]
    stored = stored_on_absent_device(spec, device)
    models = [
        build_without_memory(spec, block_tokens=16, planned="cuda", stored=one)
        for one in (dict(stored), {})
    ]
    kept, floats = (
        sum(
            param.packed_bytes or 2 * param.tensor.numel()
            for param in model.weights.params
            if param.name.endswith(("gate_up_proj", "down_proj"))
        )
        for model in models
    )
    assert 0.27 * floats < kept < 0.5 * floats  # small matrices, of which a tile is more
    costs = [cost_of(model, dtype=torch.bfloat16) for model in models]
    assert costs[1].weight_bytes - costs[0].weight_bytes == floats - kept
    assert costs[0].multiplied == costs[1].multiplied
    ((size, experts, chosen),) = costs[0].routed
    assert size >= kept and experts > chosen > 0 and costs[0].read_by(1) < costs[0].read_bytes
    chosen = {d.field: d.chosen for d in kernels_on_absent_device(spec, device, block_tokens=16)}
    assert chosen["kernel.experts_int4"] == "triton"


def test_a_rank_keeps_the_scales_of_its_own_inputs(tmp_path: Path) -> None:
    """The second half of the inputs of gpt-oss's downs, as two ranks share them."""
    experts, inputs, outputs = 2, 128, 64
    generator = torch.Generator().manual_seed(2)
    shape = experts, outputs, inputs // 32
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    bits = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    plain = (
        torch.tensor(LEVELS["e2m1"])[bits.int()] * torch.exp2(scales.float() - 127)[..., None]
    ).flatten(-2)
    name = "mlp.experts.down_proj"
    whole, half = (experts, inputs, outputs), inputs // 2
    param = Param(
        name=name, shape=whole, dtype=torch.float32,
        pieces=(WeightPiece(name=name, shape=whole),),
        shard=Shard(axis="tp", dim=1, parts=(Part("inner values", inputs, 2),)),
        spans=(Span(start=half, size=half, local=0),),
        tensor=torch.empty(experts, half, outputs),
    )  # fmt: skip
    matrices = MatricesOf(param=param, names=("down",), size=outputs, in_turn=True)
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    sizes = MixtureSizes(experts, outputs, half)
    with closing(open_weight(tmp_path, {"quant_method": "mxfp4"}, stored)) as source:
        kept = StoredGpuExperts([matrices], "mxfp4", sizes, device=torch.device("cpu"))
        for copy in copies(param):
            for one in each_matrix(copy):
                assert param.on_groups is not None
                assert param.on_groups(one, *source.groups(name, one.source)) is None
    taken = kept.take()
    assert isinstance(taken, Int4Experts)
    for expert in range(experts):
        found = dequantize(taken.matrix("down", expert), torch.float32)
        assert torch.equal(found, plain[expert][:, half:])
