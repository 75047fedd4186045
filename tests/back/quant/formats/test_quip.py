"""QuIP#'s weights against its codebooks and its forward pass written out (quip-sharp of July 2024). QNT-17."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.models.load.quantized import QuantizedSource
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.formats.rotations import hadamard
from headrace.base.config.looked_up_arrangements import HADAMARD_ORDERS
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

TWELVES = """31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133
33133311 33133131 33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 31331313 13331133
13333311 13333131 13331331 13333113 13331313 11331333 33113331"""
BOOKS = {"E8P12": (2, 1, 0.0), "E8P12RVQ3B": (3, 0, 2.04), "E8P12RVQ4B": (4, 1, 3.45)}


def sizes_of_e8p() -> torch.Tensor:
    near = [one for one in product((0.5, 1.5, 2.5), repeat=8) if sum(x * x for x in one) <= 10]
    far = [[int(digit) / 2 for digit in one] for one in TWELVES.split()]
    return torch.tensor([*near, *far])


def e8p_vector(code: int, sizes: torch.Tensor) -> torch.Tensor:
    """One index of 16 bits: sizes in the upper half, signs in the lower."""
    mixed = sizes[code >> 8][[0, 2, 4, 6, 1, 3, 5, 7]].clone()
    mixed[7] *= 1 - 2 * (mixed.sum() % 2)
    odd = bin(code & 255).count("1") % 2
    signs = (code & 255) ^ odd
    vector = torch.zeros(8)
    for i, place in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
        vector[i] = mixed[place] * (-1 if signs >> place & 1 else 1)
    return vector + (-0.25 if odd else 0.25)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """[O, I / 8] indices as words, a bit at a time."""
    outputs, vectors = codes.shape
    words = torch.zeros(outputs // 2, vectors // 2, dtype=torch.int64)
    for o in range(outputs):
        for v in range(vectors):
            code, i = int(codes[o, v]), o % 2 + 2 * (v % 2)
            word = (code >> 8) << 8 * i
            for bit in range(8):
                word |= (code >> bit & 1) << 32 + 4 * bit + i
            words[o // 2, v // 2] |= word if word < 1 << 63 else word - (1 << 64)
    tiles = words.view(outputs // 16, 8, vectors // 8, 4).transpose(1, 2)
    return tiles.reshape(outputs, vectors // 4).contiguous()


def roots() -> torch.Tensor:
    grids = torch.cat(
        [
            torch.tensor(list(product((-2.0, -1.0, 0.0, 1.0), repeat=8))),
            torch.tensor(list(product((-1.5, -0.5, 0.5, 1.5), repeat=8))),
        ]
    )
    even = grids[(grids.sum(1) % 2 == 0) & (grids.square().sum(1) <= 2)]
    twos = 2 * torch.eye(8)
    return torch.cat((even, twos, -twos[:7]))


def quip_stored(book: str, outputs: int, inputs: int) -> tuple[Stored, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    bits, _, divisor = BOOKS[book]
    sizes = sizes_of_e8p()
    vectors = torch.zeros(outputs, inputs)
    parts = []
    for scale in (1.0, divisor)[: 1 + (bits == 4)]:
        codes = torch.randint(0, 1 << 16, (outputs, inputs // 8), generator=generator)
        each = [e8p_vector(int(code), sizes) for code in codes.flatten()]
        vectors += torch.stack(each).view(outputs, inputs) / scale
        parts.append(packed(codes))
    if bits == 3:
        codes = torch.randint(0, 256, (outputs, inputs // 8), generator=generator)
        vectors += roots()[codes].view(outputs, inputs) / divisor
        eights = codes.view(outputs, -1, 8).to(torch.uint8)
        parts.append(eights.view(torch.int64).squeeze(-1))
    signs = torch.randint(0, 2, (inputs + outputs,), generator=generator) * 2.0 - 1
    su, sv = signs.split((inputs, outputs))
    stored = {"Qidxs": torch.cat(parts, 1), "SU": su.half(), "SV": (sv * 0.75).half()}
    stored |= {"Wscale": torch.tensor(0.5), "codebook_id": torch.tensor(7)}
    return stored, sv[:, None] * 0.375 * rotation(outputs) @ vectors @ rotation(inputs).t() * su


def assert_close(source: QuantizedSource, name: str, weight: torch.Tensor) -> None:
    """All of it, and a rectangle."""
    rows, columns = weight.shape
    for cut in ((slice(0, rows), slice(0, columns)), (slice(3, rows - 2), slice(5, 40))):
        target = torch.empty(weight[cut].shape)
        source.copy(name, tuple(weight.shape), cut, target)
        torch.testing.assert_close(target, weight[cut], rtol=1e-5, atol=1e-5)


def rotation(length: int) -> torch.Tensor:
    """The Kronecker product with Sylvester's matrix."""
    order = next(one for one in HADAMARD_ORDERS if length % one == 0)
    matrix = hadamard(order) if order > 1 else torch.ones(1, 1)
    while len(matrix) < length:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix / length**0.5


def opened(folder: Path, config: dict[str, Any], stored: Stored, module: str) -> QuantizedSource:
    tensors = {f"{module}.{name}": one.contiguous() for name, one in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    quantization = stored_quantization(config, "config.json")
    assert quantization is not None
    return QuantizedSource(SafetensorsSource(folder), quantization)


@pytest.mark.parametrize(
    ("book", "shape"), [("E8P12", (48, 64)), ("E8P12RVQ3B", (16, 192)), ("E8P12RVQ4B", (32, 64))]
)
def test_a_weight_is_what_its_forward_pass_multiplies_with(
    book: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    stored, weight = quip_stored(book, *shape)
    params = {"codebook": book, "codebook_version": BOOKS[book][1], "fused": False}
    with closing(opened(tmp_path, {"quip_params": params}, stored, "module")) as source:
        assert list(source.entries) == ["module.weight"]
        assert_close(source, "module.weight", weight)
    del stored["Wscale"]
    with pytest.raises(CheckpointError, match=r"module\.Wscale is missing"):
        opened(tmp_path, {"quip_params": params}, stored, "module")


def test_merged_projections_are_told_apart(tmp_path: Path) -> None:
    """Rotated together, each with a scale of its own."""
    stored, weight = quip_stored("E8P12", 64, 64)
    stored["fuse_scales"] = torch.tensor([1.0, 0.5, 2.0])
    params = {"codebook": "E8P12", "codebook_version": 1}
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 8, "intermediate_size": 96, "quip_params": params}
    with closing(opened(tmp_path, config, stored, "layer.qkv_proj")) as source:
        first = 0
        for name, rows, scale in (("q", 32, 1.0), ("k", 16, 0.5), ("v", 16, 2.0)):
            part = weight[first : first + rows] * scale
            assert_close(source, f"layer.{name}_proj.weight", part)
            first += rows
    with pytest.raises(CheckpointError, match=r"has 64 outputs; q_proj has 64, k_proj has 32"):
        opened(tmp_path, config | {"head_dim": 16}, stored, "layer.qkv_proj")


@pytest.mark.parametrize("order", HADAMARD_ORDERS[:-1])
def test_hadamard_matrices_are_orthogonal(order: int) -> None:
    matrix = hadamard(order)
    assert set(matrix.flatten().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(matrix @ matrix.t(), order * torch.eye(order), rtol=0, atol=0)


def test_a_length_without_a_matrix_is_refused(tmp_path: Path) -> None:
    stored, _ = quip_stored("E8P12", 16, 64)
    stored |= {"SU": torch.ones(704), "Qidxs": torch.zeros(16, 22, dtype=torch.int64)}
    params = {"codebook": "E8P12", "codebook_version": 1, "fused": False}
    with pytest.raises(CheckpointError, match=r"no Hadamard matrix of 704"):
        opened(tmp_path, json.loads(json.dumps({"quip_params": params})), stored, "module")


@pytest.mark.slow
def test_a_model_answers_as_its_weights_taken_apart(tmp_path: Path) -> None:
    """Queries, keys and values in one weight, and ups and gates, in this order."""
    config = tiny_config("llama")
    config.update({"hidden_size": 64, "intermediate_size": 64, "head_dim": 16})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 4})
    oracle = save_oracle(config, tmp_path)
    stored, back = load_file(tmp_path / "model.safetensors"), oracle.state_dict()
    merged = {"self_attn.qkv_proj": "qkv", "mlp.upgate_proj": ("up", "gate")}
    plain = {"self_attn.o_proj": ("o",), "mlp.down_proj": ("down",)}
    for layer in range(config.num_hidden_layers):
        for module, parts in (merged | plain).items():
            at = f"model.layers.{layer}.{module}"
            tensors, weight = quip_stored("E8P12", 64 * len(parts), 64)
            weight = weight * 0.1
            tensors["Wscale"] = tensors["Wscale"] * 0.1
            if len(parts) > 1:
                tensors["fuse_scales"] = torch.ones(len(parts))
            stored |= {f"{at}.{name}": one.contiguous() for name, one in tensors.items()}
            for name, one in zip(parts, weight.chunk(len(parts)), strict=True):
                own = f"{at.rpartition('.')[0]}.{name}_proj.weight"
                del stored[own]
                back[own] = one
    save_file(stored, tmp_path / "model.safetensors")
    oracle.load_state_dict(back)
    file = tmp_path / "config.json"
    params = {"codebook": "E8P12", "codebook_version": 1, "fused": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quip_params": params}))
    rows = [list(range(3, 30)), [5, 1, 2]]
    model, _ = load_model(
        model_spec(tmp_path), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)
