"""Quantizing while a checkpoint loads: packed once, when full, and never held twice (PLT-09,
QNT-09)."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from headrace.back.kernels.linear_blocks import layout as blocks
from headrace.back.kernels.linear_quant import layout as rows
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Param, WeightPiece
from headrace.back.quant.online import OnlineWeight, layout_of, pack
from headrace.back.quant.scheme import SCHEMES
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import PagedRun, random_rows
from tests.models.test_parity import tiny_config


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (65, 33), (700, 129), (300, 2048)])
def test_packed_weights_read_back_as_quantized(name, outputs, inputs):
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    scheme = SCHEMES[name]
    packed, expected = pack(weight, scheme), scheme.quantize(weight)
    wanted = torch.arange(outputs)
    if isinstance(packed, PackedWeight):
        ours, num_bytes = (
            (*rows.read_rows(packed, wanted), None),
            rows.packed_bytes(outputs, inputs),
        )
        panels = packed.panels
    else:
        ours, panels = blocks.read_rows(packed.segments[0], wanted), packed.segments[0].panels
        num_bytes = layout_of(scheme).packed_bytes(outputs, inputs)
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert panels.nbytes == num_bytes


def dequantized(packed):
    """float32 [O, I]: what the codes say."""
    if isinstance(packed, PackedWeight):
        return rows.dequantize_rows(packed, torch.arange(packed.outputs))
    (segment,) = packed.segments
    return blocks.dequantize_rows(segment, torch.arange(segment.outputs))


def test_a_full_parameter_gives_its_plain_tensor_up_at_once():
    param = Param(
        name="w",
        shape=(64, 64),
        dtype=torch.float32,
        pieces=(WeightPiece(name="w", shape=(64, 64)),),
        tensor=torch.ones(64, 64),
    )
    weight = OnlineWeight(param, SCHEMES["int8"])
    param.filled()
    assert param.tensor is None
    assert torch.equal(dequantized(weight.take()), torch.ones(64, 64))
    with pytest.raises(AssertionError, match="taken before"):
        weight.take()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("tied", [True, False])
def test_after_loading_only_norms_and_an_untied_embedding_are_plain(tmp_path, name, tied):
    config = tiny_config("qwen3")
    config.tie_word_embeddings = tied
    save_oracle(config, tmp_path)
    model, report = load_model(
        replace(model_spec(tmp_path), quantization=name),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    plain = [p for p in model.weights.params if not p.packed_bytes and len(p.shape) == 2]
    assert [p.name for p in plain] == ([] if tied else ["model.embed_tokens.weight"])
    norms = sum(4 * p.shape[0] for p in model.weights.params if len(p.shape) == 1)
    packed = sum(p.packed_bytes for p in model.weights.params)
    embedding = sum(4 * p.shape[0] * p.shape[1] for p in plain)
    assert report.weight_bytes == norms + packed + embedding
    op = "kernel.linear_quant" if SCHEMES[name].group is None else "kernel.linear_blocks"
    assert op in {decision.field for decision in report.decisions}


def logits(folder, scheme):
    model = load_ours(replace(model_spec(folder), quantization=scheme))
    run = PagedRun(model, random_rows(97, (9, 4)), block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    return torch.cat(run.step([(0, 9), (1, 4)]))


def write_dequantized(folder, scheme):
    """Replaces every matrix of the checkpoint that is quantized by what its codes and scales
    say."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        untied = "embed_tokens" in name and "lm_head.weight" in tensors
        if tensor.dim() == 2 and not untied:
            tensors[name] = dequantized(pack(tensor, SCHEMES[scheme])).contiguous()
    save_file(tensors, path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_logits_differ_from_those_of_the_same_weights_by_the_activations_rounding(
    tmp_path, family, name
):
    """Relative error in the Euclidean norm. Random weights, so the worst case; of fp8 activations
    are not rounded."""
    save_oracle(tiny_config(family), tmp_path)
    plain, ours = logits(tmp_path, None), logits(tmp_path, name)
    whole = ((ours - plain).norm() / plain.norm()).item()
    write_dequantized(tmp_path, name)
    exact = logits(tmp_path, None)
    bound = 1e-5 if name == "fp8" else 0.06
    assert 0 < ((ours - exact).norm() / exact.norm()).item() < bound
    # Numbers in e4m3 err by 2.6 % of themselves, in int8 by 0.9 % of their deviation (a largest of
    # four of it): three times int8's bound.
    assert whole < (0.18 if name == "fp8" else {8: 0.06, 4: 0.6}[SCHEMES[name].bits])


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "int4-asym-g128"])
def test_the_gate_is_inside_the_product_where_its_panels_are_whole(tmp_path, name):
    """The same bounds as above, and no kernel for the gate alone."""
    config = tiny_config("qwen3")
    config.intermediate_size = 128
    save_oracle(config, tmp_path)
    spec = replace(model_spec(tmp_path), quantization=name)
    fields = {decision.field for decision in load_ours(spec).decisions}
    assert "kernel.gated_act" not in fields
    ours = logits(tmp_path, name)
    write_dequantized(tmp_path, name)
    exact = logits(tmp_path, None)
    assert 0 < ((ours - exact).norm() / exact.norm()).item() < 0.06
