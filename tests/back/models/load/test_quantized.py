"""Checkpoints with quantized weights load as they are, and answer as transformers does with the
same weights dequantized. QNT-01 QNT-06 QNT-12."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

import headrace.back.kernels.linear_blocks.layout as linear_blocks
import headrace.back.kernels.linear_quant.layout as linear_quant
import headrace.back.models.load as loading
from headrace.back.kernels.kv_write.quantized import values_and_scales
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.native import library as native
from headrace.back.models.load import load_model, open_source
from headrace.back.models.load.fill import fill
from headrace.back.models.protocol import LoadableModel
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Copy, Param, WeightPiece
from headrace.back.parallel.shard import Part, Shard, Span
from headrace.back.quant.experts import MatricesOf, StoredExperts
from headrace.back.quant.kept import KeptWeight
from headrace.back.quant.scheme import SCHEMES
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.quant.formats.stored_weights import open_weight
from tests.back.quant.formats.test_formats import awq_words, bit_stream
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import PagedRun, teacher_forced
from tests.models.test_parity import tiny_config

Stored = dict[str, torch.Tensor]
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def grouped(weight: torch.Tensor, top: int = 15) -> tuple[torch.Tensor, ...]:
    """Values 0 .. top, zero points and scales [O, G], and the weight they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(0, top)
    values = (groups / scales + zeros).round().clamp(0, top)
    return values.flatten(1), zeros[..., 0], scales[..., 0], ((values - zeros) * scales).flatten(1)


def gptq(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    values, zeros, scales, plain = grouped(weight)
    return {
        f"{name}.qweight": bit_stream(values, 4).t(),
        f"{name}.qzeros": bit_stream((zeros - 1).t() % 16, 4),
        f"{name}.scales": scales.t().half(),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }, plain


def awq(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    values, zeros, scales, plain = grouped(weight)
    return {
        f"{name}.qweight": awq_words(values.t()),
        f"{name}.qzeros": awq_words(zeros.t()),
        f"{name}.scales": scales.t().half(),
    }, plain


def fp8(name: str, weight: torch.Tensor, block: int = 32) -> tuple[Stored, torch.Tensor]:
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // block), -(-columns // block)) + 0.1
    spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    values = (weight / spread).to(torch.float8_e4m3fn)
    stored = {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}
    return stored, values.float() * spread


def int8(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round()
    stored = {f"{name}.weight": values.to(torch.int8), f"{name}.weight_scale": scales}
    return stored, values * scales


def bitnet(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    from transformers.integrations.bitnet import pack_weights  # brings in torch's compiler: 1 s

    scale = weight.abs().mean()
    values = (weight / scale).round().clamp(-1, 1)
    stored = {f"{name}.weight": pack_weights(values.clone()), f"{name}.weight_scale": scale[None]}
    return stored, values * scale


def quanto(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """The second half of the outputs in the upper halves of bytes, one scale and shift for each."""
    shifts, top = -weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scales = (top + shifts) / 15
    values = ((weight + shifts) / scales).round().to(torch.uint8)
    first, second = values.chunk(2)
    parts = {"_data._data": first | second << 4, "_scale": scales, "_shift": shifts}
    stored = {f"{name}.weight.{part}": tensor for part, tensor in parts.items()}
    stored |= {f"{name}.{side}_scale": torch.ones(()) for side in ("input", "output")}
    return stored, values * scales - shifts


FORMATS: dict[str, tuple[Callable[..., tuple[Stored, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8-blocks": (
        partial(fp8, block=128),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "bitnet": (bitnet, {"quant_method": "bitnet", "linear_class": "autobitlinear"}),
    "quanto": (quanto, {"quant_method": "quanto", "weights": "int4", "hidden_size": 64}),
    "int8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
}


def quantize_folder(folder: Path, format: str) -> Any:
    """Quantizes the layers' linear weights of the checkpoint in `folder`; the transformers model
    with the weights that are stored."""
    config = tiny_config("qwen3")
    config.update(SIZES)
    oracle = save_oracle(config, folder)
    quantize, quantization = FORMATS[format]
    plain = load_file(folder / "model.safetensors")
    stored, back = dict(plain), oracle.state_dict()
    for name, weight in plain.items():
        if ".layers." in name and weight.dim() == 2:
            del stored[name]
            parts, back[name] = quantize(name.removesuffix(".weight"), weight)
            stored |= parts
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors"
    )
    oracle.load_state_dict(back)
    file = folder / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": quantization})
    )
    return oracle


def load(
    folder: Path, kv_dtype: str | None = None, **changes: Any
) -> tuple[LoadableModel, tuple[Decision, ...]]:
    spec = replace(model_spec(folder, **changes), kv_dtype=kv_dtype)
    cpu = torch.device("cpu")
    model, report = load_model(spec, mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS)
    return model, report.decisions


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_checkpoint_answers_as_its_weights_dequantized(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no kernel that reads them."""
    monkeypatch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
    oracle = quantize_folder(tmp_path, format)
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, decisions = load(tmp_path)
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    (weights,) = (one for one in decisions if one.field == "weights")
    assert weights.chosen == "floats" and "21 " in weights.why
    assert weights.why.endswith("dequantized to float32")


KEPT = {
    "gptq": ("21 4-bit gptq", "int4-asym"),
    "awq": ("21 4-bit awq", "int4-asym"),
    "int8": ("21 8-bit scaled", "int8"),
    "bitnet": ("21 2-bit ternary", "int8"),
    "fp8-blocks": ("21 8-bit fp8-blocks", "fp8-g128"),
}


@pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)
@pytest.mark.parametrize("format", KEPT)
def test_what_a_kernel_reads_is_packed_as_it_is(format: str, tmp_path: Path) -> None:
    """The GEMMs round activations to int8, nothing else."""
    oracle = quantize_folder(tmp_path, format)
    count, _ = KEPT[format]
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, decisions = load(tmp_path)
    (weights,) = (one for one in decisions if one.field == "weights")
    assert (weights.chosen, weights.why) == (count, "read as the file holds them")
    assert sum(param.on_groups is not None for param in model.weights.params) == 12
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        assert (row - expected).norm() < 0.05 * expected.norm()


@pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)
def test_ternary_weights_meet_inputs_rounded_as_bitnet_asks(tmp_path: Path) -> None:
    """To int8, a scale for each token: what the kernels do anyway."""

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = 127 / inputs[0].abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
        return ((inputs[0] * scale).round().clamp(-128, 127) / scale,)

    oracle = quantize_folder(tmp_path, "bitnet")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(rounded)
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, _ = load(tmp_path)
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        assert (row - expected).norm() < 0.01 * expected.norm()


NATIVE = pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)


def mlx(name: str, weight: torch.Tensor, bits: int = 4) -> tuple[Stored, torch.Tensor]:
    values, zeros, scales, plain = grouped(weight, (1 << bits) - 1)
    return {
        f"{name}.weight": bit_stream(values, bits).view(torch.uint32),
        f"{name}.scales": scales,
        f"{name}.biases": -zeros * scales,
    }, plain


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=NATIVE), False])
def test_mlx_packs_the_table_of_tokens_too(
    kernels: bool, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QNT-01: whole numbers with a float that is added, read as they are where there are kernels."""
    if not kernels:
        monkeypatch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
    config = tiny_config("qwen3")
    config.update(SIZES)
    oracle = save_oracle(config, tmp_path)
    stored, back = {}, oracle.state_dict()
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stored[name] = weight
        if weight.dim() == 2:
            parts, back[name] = mlx(name.removesuffix(".weight"), weight, bits)
            stored |= parts
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, tmp_path / "model.safetensors"
    )
    oracle.load_state_dict(back)
    written = {"quant_method": "mlx", "group_size": GROUP, "bits": bits}
    model, decisions = load(tmp_path, quantization_config=written)
    (weights,) = (one for one in decisions if one.field == "weights")
    assert ("dequantized" in weights.why) != kernels, weights
    rows = [list(range(3, 30)), [5, 1, 2]]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        assert (row - expected).norm() < (0.05 if kernels else 1e-4) * expected.norm()


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=NATIVE), False])
def test_mlx_stacks_the_experts_of_a_layer(
    kernels: bool, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name of its own, all experts' gates in one tensor; where there are kernels they stay quantized."""
    if not kernels:
        monkeypatch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
    config = tiny_config("olmoe")
    config.update({"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4})
    config.num_experts_per_tok = config.num_experts  # none is chosen by a hair
    oracle = save_oracle(config, tmp_path)
    plain, stored = load_file(tmp_path / "model.safetensors"), {}
    experts = config.num_experts
    for name, weight in plain.items():
        head, _, tail = name.partition(".experts.0.")
        if not tail:
            stored |= {} if ".experts." in name else {name: weight}
            continue
        parts = [mlx("m", plain[f"{head}.experts.{i}.{tail}"], bits) for i in range(experts)]
        stem = f"{head}.switch_mlp.{tail.removesuffix('.weight')}"
        for role in ("weight", "scales", "biases"):
            stored[f"{stem}.{role}"] = torch.stack([part[f"m.{role}"] for part, _ in parts])
        for i, (_, back) in enumerate(parts):
            plain[f"{head}.experts.{i}.{tail}"] = back
    save_file(
        {name: value.contiguous() for name, value in plain.items()}, tmp_path / "model.safetensors"
    )
    oracle = type(oracle).from_pretrained(tmp_path, dtype=torch.float32).eval()
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, tmp_path / "model.safetensors"
    )
    written = {"quant_method": "mlx", "group_size": GROUP, "bits": bits}
    model, decisions = load(tmp_path, quantization_config=written)
    (weights,) = (one for one in decisions if one.field == "weights")
    assert weights.chosen == ("floats" if not kernels else f"{3 * 3 * experts} {bits}-bit mlx"), (
        weights
    )
    rows = [list(range(3, 30)), [5, 1, 2]]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        assert (row - expected).norm() < (0.05 if kernels else 1e-4) * expected.norm()


CACHE_NAMES = {
    "in the attention": ("k_scale", "v_scale"),
    "in its kernel": ("attn.k_scale", "attn.v_scale"),
    "in the projections": ("k_proj.k_scale", "v_proj.v_scale"),
    "of their outputs": ("k_proj.output_scale", "v_proj.output_scale"),
    "of both": ("kv_scale",),
}


def add_tensors(folder: Path, tensors: Stored) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


@pytest.mark.parametrize("naming", CACHE_NAMES)
def test_scales_of_the_cache_are_used_under_all_their_names(naming: str, tmp_path: Path) -> None:
    """QNT-13: the runtime scale is the stored one. One for all heads, or one for each. REG-061."""
    quantize_folder(tmp_path, "int8")
    heads = 2
    of_head = torch.full((heads, 1, 1), 0.37)
    of_head[1] = 0.5
    scales = {}
    for layer in range(3):
        stem = f"model.layers.{layer}.self_attn"
        value = torch.tensor([0.37]) if layer else of_head
        scales |= {f"{stem}.{name}": value.clone() for name in CACHE_NAMES[naming]}
    add_tensors(tmp_path, scales)
    model, decisions = load(tmp_path, kv_dtype="fp8")
    (decision,) = (one for one in decisions if one.field == "kv_scales")
    assert (decision.requested, decision.chosen) == ("6 stored", "used")
    run = PagedRun(model, [[3, 4, 5, 6, 7]], block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    run.step([(0, 5)])
    block = int(run.tables[0, 0, 0])
    for layer in range(3):
        _, written = values_and_scales(run.kv[layer])
        expected = of_head[:, 0] if layer == 0 else torch.full((heads, 1), 0.37)
        assert torch.equal(written[block, :, :, :5], expected.expand(2, heads, 5))
    _, decisions = load(tmp_path)
    (decision,) = (one for one in decisions if one.field == "kv_scales")
    assert decision.chosen == "not used" and "--kv-dtype fp8" in decision.why


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"self_attn.k_scale": 0.37}, "for k alone"),
        ({"self_attn.k_scale": -1.0, "self_attn.v_scale": 1.0}, r"k_scale is \[-1.0\].*positive"),
        ({"self_attn.k_scale": torch.ones(3), "self_attn.v_scale": 1.0}, "each of 2 KV heads"),
        ({"self_attn.kv_scale": 1.0, "self_attn.v_scale": 1.0}, "second v scale"),
        ({"other.k_scale": 1.0, "other.v_scale": 1.0}, "layers.0.other.*no attention"),
        ({"self_attn.kv_scale": 1.0, "self_attn.k_zero_point": 3.0}, "k_zero_point is not 0"),
    ],
)
def test_tampered_scales_of_the_cache_are_refused(
    tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    quantize_folder(tmp_path, "int8")
    values = {name: torch.as_tensor(value).reshape(-1) for name, value in tensors.items()}
    add_tensors(tmp_path, {f"model.layers.0.{name}": value for name, value in values.items()})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, kv_dtype="fp8")


def as_int8(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A token's values in 127 steps of its largest magnitude."""
    (x,) = inputs
    top = x.abs().amax(-1, keepdim=True)
    return ((x * (top.new_tensor(127.0) / top)).round() * (top / 127.0),)


def int8_at(
    scale: float, zero: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Every token's values in steps of a scale, as far as the integers reach."""
    return (((inputs[0] / scale + zero).round().clamp(-128, 127) - zero) * scale,)


def linear_layers(oracle: Any) -> dict[str, torch.nn.Linear]:
    modules = oracle.model.layers.named_modules(prefix="model.layers")
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}


def ask_int8(folder: Path, **asked: Any) -> None:
    """Adds what the checkpoint would have its inputs be."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, **asked}
    file.write_text(json.dumps(config))


@pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)
@pytest.mark.parametrize("kind", ["token", "tensor", "zero"])
def test_int8_activations_are_multiplied_as_integers(kind: str, tmp_path: Path) -> None:
    """QNT-17: W8A8, as transformers does whose linear layers read rounded inputs: by a scale for each token,
    or by those that the checkpoint holds for all, with a zero point or without."""
    oracle = quantize_folder(tmp_path, "int8")
    rows, layers = [list(range(3, 30)), [5, 1, 2]], linear_layers(oracle)
    plain, told = oracle_logits(oracle, rows), "int8, a scale for a token"
    if kind == "token":
        ask_int8(tmp_path, strategy="token", dynamic=True)
        hooks = dict.fromkeys(layers, as_int8)
    else:
        told = "int8, the stored scale"
        ask_int8(tmp_path, strategy="tensor", dynamic=False, symmetric=kind == "tensor")
        # Of inputs that several layers read: the largest magnitude is beyond the range.
        steps = {"down_proj": 0.004, "o_proj": 0.008}
        scales = {name: steps.get(name.rpartition(".")[2], 0.02) for name in layers}
        zero = 0 if kind == "tensor" else 11
        hooks = {name: partial(int8_at, scale, zero) for name, scale in scales.items()}
        stored = {f"{name}.input_scale": torch.tensor([scale]) for name, scale in scales.items()}
        if zero:
            point = torch.tensor([zero], dtype=torch.int8)
            stored |= {f"{name}.input_zero_point": point.clone() for name in layers}
        add_tensors(tmp_path, stored)
    model, decisions = load(tmp_path)
    (inputs,) = (one for one in decisions if one.field == "activations")
    asked = (
        "int8, a scale and a zero point for a tensor"
        if kind == "zero"
        else f"int8, a scale for a {kind}"
    )
    assert inputs.requested.startswith(asked)
    assert (inputs.chosen, inputs.why) == (told, "of 21 quantized weights")
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for name, hook in hooks.items():
        layers[name].register_forward_pre_hook(hook)
    for row, unrounded, expected in zip(ours, plain, oracle_logits(oracle, rows), strict=True):
        # A value that is off in its last bits may be rounded to the next integer.
        assert (row - expected).norm() < 0.5 * (row - unrounded).norm()


@pytest.mark.parametrize("format", [name for name in KEPT if name != "fp8-blocks"])
@pytest.mark.parametrize("cut", [None, (slice(8, 72), slice(32, 96))])
def test_packed_numbers_are_the_stored_ones(
    format: str, cut: tuple[slice, slice] | None, tmp_path: Path
) -> None:
    """All of a weight, or the part of a rank; scales of groups are rounded to bfloat16."""
    quantize, config = FORMATS[format]
    weight = torch.randn(80, 96, generator=torch.Generator().manual_seed(3))
    stored, plain = quantize("m", weight)
    cut = cut or (slice(0, 80), slice(0, 96))
    with closing(open_weight(tmp_path, config, stored)) as source:
        entry = source.entries["m.weight"]
        assert entry.scheme == KEPT[format][1]
        groups, numbers = source.groups("m.weight", cut)
        shape = (cut[0].stop - cut[0].start, cut[1].stop - cut[1].start)
        piece = WeightPiece(name="m.weight", shape=(80, 96))
        param = Param(
            name="m",
            shape=shape,
            dtype=torch.float32,
            pieces=(piece,),
            tensor=torch.empty(shape),
        )
        kept = KeptWeight(param, SCHEMES[entry.scheme])
        whole = (slice(0, shape[0]), slice(0, shape[1]))
        copy = Copy(name="m.weight", shape=(80, 96), source=cut, target=whole)
        assert param.on_groups is not None
        assert param.on_groups(copy, groups, numbers) is None
        param.filled()
        packed = kept.take()
    rows = torch.arange(shape[0])
    back = (
        linear_blocks.dequantize_rows(packed.segments[0], rows)
        if isinstance(packed, BlockWeight)
        else linear_quant.dequantize_rows(packed, rows)
    )
    torch.testing.assert_close(back, plain[cut], rtol=0, atol=0.01 * plain.abs().max().item())


def test_a_rank_that_would_cut_a_group_is_refused_with_the_numbers() -> None:
    param = Param(
        name="m",
        shape=(80, 96),
        dtype=torch.float32,
        pieces=(WeightPiece(name="m.weight", shape=(80, 96)),),
        shard=Shard(axis="tp", dim=1, parts=(Part("inputs", 96, 96),)),
        spans=(Span(start=0, size=48, local=0),),
        tensor=torch.empty(80, 48),
    )
    with pytest.raises(ConfigError, match=r"inputs 0 to 48 of m\.weight: that cuts.*group of 32"):
        KeptWeight(param, SCHEMES["int4"])


def test_symmetric_zero_points_must_be_the_middle(tmp_path: Path) -> None:
    quantize, config = FORMATS["gptq"]
    stored, _ = quantize("m", torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))
    with closing(open_weight(tmp_path, {**config, "sym": True}, stored)) as source:
        whole = (slice(0, 64), slice(0, 64))
        groups, numbers = source.groups("m.weight", whole)
        piece = WeightPiece(name="m.weight", shape=(64, 64))
        param = Param(
            name="m",
            shape=(64, 64),
            dtype=torch.float32,
            pieces=(piece,),
            tensor=torch.empty(64, 64),
        )
        assert source.entries["m.weight"].scheme == "int4"
        KeptWeight(param, SCHEMES["int4"])
        copy = Copy(name="m.weight", shape=(64, 64), source=whole, target=whole)
        assert param.on_groups is not None
        with pytest.raises(CheckpointError, match="a zero point is not 8"):
            param.on_groups(copy, groups, numbers)


def mxfp4_experts(folder: Path) -> Any:
    """gpt-oss as it is published: blocks and scales of the experts, all else plain. The oracle has what
    transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tmp_path = folder
    config = tiny_config("gpt-oss")
    config.hidden_size, config.intermediate_size = 64, 96
    oracle = save_oracle(config, tmp_path)
    generator = torch.Generator().manual_seed(5)
    stored, back = load_file(tmp_path / "model.safetensors"), oracle.state_dict()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        back[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, tmp_path / "model.safetensors")
    oracle.load_state_dict(back)
    return oracle


needs_native = pytest.mark.skipif(
    not isinstance(native.load(), native.NativeLibrary), reason="the native kernels are not built"
)


@pytest.mark.parametrize("kept", [pytest.param(True, marks=needs_native), False])
def test_experts_in_mxfp4_answer_as_dequantized(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are stored, activations become int8 on the way."""
    oracle = mxfp4_experts(tmp_path)
    if not kept:
        monkeypatch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, decisions = load(tmp_path, quantization_config={"quant_method": "mxfp4"})
    (weights,) = (one for one in decisions if one.field == "weights")
    assert weights.chosen == ("6 4-bit mxfp4-blocks" if kept else "floats")
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        if kept:
            assert torch.nn.functional.cosine_similarity(row, expected).min() > 0.99
        else:
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_packed_experts_stand_for_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    """Bit for bit what transformers dequantizes."""
    back = mxfp4_experts(tmp_path).state_dict()
    spec = model_spec(tmp_path, quantization_config={"quant_method": "mxfp4"})
    stem = "model.layers.1.mlp.experts"
    shapes = {name: tuple(back[f"{stem}.{name}"].shape) for name in ("gate_up_proj", "down_proj")}
    params = {
        name: Param(
            name=name,
            shape=shape,
            dtype=torch.float32,
            pieces=(WeightPiece(name=f"{stem}.{name}", shape=shape),),
            tensor=torch.empty(shape),
        )
        for name, shape in shapes.items()
    }
    experts, inner, width = shapes["down_proj"]
    matrices = (
        MatricesOf(param=params["gate_up_proj"], names=("gate", "up"), size=inner, in_turn=True),
        MatricesOf(param=params["down_proj"], names=("down",), size=width, in_turn=True),
    )
    schemes = dict.fromkeys(("gate", "up", "down"), "mxfp4")
    stored = StoredExperts(matrices, schemes, experts=experts, width=width, inner=inner, meta=False)
    with closing(open_source(spec)) as source:
        fill(WeightPlan(params=tuple(params.values()), ignored=(".*",)), source)
    packed = stored.take()
    up, down = back[f"{stem}.gate_up_proj"], back[f"{stem}.down_proj"]
    wanted = {"gate": up[..., 0::2], "up": up[..., 1::2], "down": down}
    for name, values in wanted.items():
        panels = getattr(packed, name)
        for i in range(experts):
            rows = torch.arange(panels.outputs)
            ours = linear_blocks.dequantize_rows(panels.matrix(i).segments[0], rows)
            assert torch.equal(ours, values[i].t()), (name, i)


def test_the_fallback_reads_them_too(tmp_path: Path) -> None:
    oracle = quantize_folder(tmp_path, "gptq")
    spec = replace(model_spec(tmp_path), family="transformers")
    cpu = torch.device("cpu")
    model, _ = load_model(spec, mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS)
    rows = [list(range(3, 30))]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    torch.testing.assert_close(ours[0], oracle_logits(oracle, rows)[0], rtol=1e-4, atol=1e-4)


def test_a_missing_part_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    quantize_folder(tmp_path, "awq")
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.qzeros"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.qzeros is missing"):
        load(tmp_path)


def test_facts_count_weights_for_the_parameters_and_bytes_as_stored(tmp_path: Path) -> None:
    oracle = quantize_folder(tmp_path, "gptq")
    facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert facts.num_params == sum(weight.numel() for weight in oracle.parameters())
    stored = sum(
        t.numel() * t.element_size() for t in load_file(tmp_path / "model.safetensors").values()
    )
    assert stored <= facts.weight_bytes <= 1.07 * stored, "kernels' scales take a little more"


def test_what_modelopt_says_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"quant_algo is 'W4A8'.*FP8"):
        read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
