"""A model over a coded KV cache: logits near those over the plain one, in chunks and step by step (QNT-18)."""

import pytest
import torch
from msgspec.structs import replace

from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import PagedRun, random_rows
from tests.models.test_parity import tiny_config


def logits(folder, kv_dtype, steps, plain=()):
    spec = replace(model_spec(folder), kv_dtype=kv_dtype, kv_plain_layers=plain)
    model = load_ours(spec)
    run = PagedRun(model, random_rows(97, (30, 12)), block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    return torch.cat([part for chunks in steps for part in run.step(chunks)])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("code", "bound"),
    [
        ("int8", 0.03),
        ("fp8", 0.12),
        ("fp8_e5m2", 0.3),
        ("int4", 0.4),
        ("nvfp4", 0.5),
        pytest.param("nvfp4-4over6", 0.5, marks=pytest.mark.slow),
        ("int3-rotated", 0.8),
        pytest.param("turboquant-4bit", 0.4, marks=pytest.mark.slow),
        pytest.param("turboquant-3bit", 0.8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "olmo2"])
def test_logits_are_near_those_over_the_plain_cache(tmp_path, family, code, bound):
    save_oracle(tiny_config(family), tmp_path)
    whole = [[(0, 30), (1, 12)]]
    plain, coded = logits(tmp_path, None, whole), logits(tmp_path, code, whole)
    assert 0 < (coded - plain).norm() / plain.norm() < bound
    pieces = [[(0, 20), (1, 3)], *([(0, 1), (1, 1)] for _ in range(9)), [(0, 1)]]
    rows = logits(tmp_path, code, pieces)
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows[-1], coded[29], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("code", "bound"), [("int8", 0.03), ("fp8", 0.12), ("nvfp4", 0.5), ("nvfp4-4over6", 0.5)]
)
@pytest.mark.parametrize(
    "family", ["deepseek-v3.2", pytest.param("minicpm3", marks=pytest.mark.slow)]
)
def test_logits_are_near_those_over_plain_latents(tmp_path, family, code, bound):
    """KRN-07, MOD-16. Neither experts nor positions are chosen, which would be others by a hair."""
    config = tiny_config(family)
    if family == "deepseek-v3.2":
        config.index_topk, config.first_k_dense_replace = 64, config.num_hidden_layers
    if code.startswith("nvfp4"):
        config.kv_lora_rank = 32
    save_oracle(config, tmp_path)
    whole = [[(0, 30), (1, 12)]]
    plain, coded = logits(tmp_path, None, whole), logits(tmp_path, code, whole)
    assert 0 < (coded - plain).norm() / plain.norm() < bound
    pieces = [[(0, 20), (1, 3)], *([(0, 1), (1, 1)] for _ in range(9)), [(0, 1)]]
    rows = logits(tmp_path, code, pieces)
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows[-1], coded[29], rtol=1e-3, atol=1e-3)


def test_skipped_layers_keep_the_type_of_the_activations(tmp_path):
    """With all layers skipped nothing is lost, with some of them less."""
    save_oracle(tiny_config("gemma2"), tmp_path)
    whole = [[(0, 30), (1, 12)]]
    plain, coded = logits(tmp_path, None, whole), logits(tmp_path, "int4", whole)
    count = tiny_config("gemma2").num_hidden_layers
    assert torch.equal(logits(tmp_path, "int4", whole, tuple(range(count))), plain)
    for skipped in ((0,), ("sliding_window",)):
        some = logits(tmp_path, "int4", whole, skipped)
        assert (some - plain).norm() > 0 and not torch.equal(some, coded)
