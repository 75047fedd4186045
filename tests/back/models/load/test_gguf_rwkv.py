"""GGUF files of RWKV 6 and 7 and of Qwen 2 with their layers: the logits of independent references, under the names of
the `gguf` library's table, with the conventions of llama.cpp's converters. QNT-15."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.back.models.load.test_gguf_blocks import gguf_spec, library
from tests.back.models.load.test_gguf_mixtures import ROWS, load, logits
from tests.references import rwkv6, rwkv7, rwkv_hybrid

Tensors = dict[str, torch.Tensor]
SIX_FUSED, SEVEN_FUSED = [f"time_maa_{one}" for one in "wkvrg"], [f"x_{one}" for one in "rwkvag"]
SIX = {
    **{"attention.": "", "self_attn.": "", "ln_x": "time_mix_ln", "time_faaaa": "time_mix_first"},
    **{"time_maa_x": "time_mix_lerp_x", "time_maa_w1": "time_mix_w1", "time_maa_w2": "time_mix_w2"},
    "time_decay": "time_mix_decay",
    **{one: f"time_mix_{one}" for one in ("receptance", "key", "value", "gate", "output")},
}
SEVEN = {
    **{"self_attn.": "", "attn.": "", "g_norm": "time_mix_ln"},
    **{
        f"{one}_proj": f"time_mix_{of}"
        for one, of in zip("rkvo", ("receptance", "key", "value", "output"), strict=True)
    },
    **{one: f"time_mix_{one}" for one in ("k_k", "k_a", "r_k")},
}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "rwkv6": ("RWKV6", rwkv6, {**rwkv6.CONFIG, "hidden_size": 64, "head_size": 16}),
    "rwkv7": (
        "RWKV7",
        rwkv7,
        {**rwkv7.CONFIG, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96},
    ),
    "rwkv6qwen2": ("RWKV6QWEN2", rwkv_hybrid, rwkv_hybrid.SIX),
    "arwkv7": ("ARWKV7", rwkv_hybrid, rwkv_hybrid.SEVEN),
    "arwkv7-ungated": ("ARWKV7", rwkv_hybrid, rwkv_hybrid.UNGATED),
}


def written(name: str, config: dict[str, Any], weights: Tensors) -> Iterator[tuple[str, Tensors]]:
    """By the name of their layer in the file, with what it holds."""
    for layer in range(config["num_hidden_layers"]):
        pattern = re.compile(rf"(?:rwkv\.blocks|model\.layers)\.{layer}\.(.*)")
        own = {match[1]: one for key, one in weights.items() if (match := pattern.fullmatch(key))}
        yield f"blk.{layer}", own


def layer_of_six(own: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    place = "attention" if any(name.startswith("attention") for name in own) else "self_attn"
    fused = torch.stack([own.pop(f"{place}.{one}") for one in SIX_FUSED])
    yield "time_mix_lerp_fused.weight", fused
    for name, tensor in own.items():
        if name.startswith(place):
            stem, _, kind = name.removeprefix(f"{place}.").rpartition(".")
            stem, kind = (stem, kind) if kind in ("weight", "bias") else (f"{stem}{kind}", "weight")
            new = next(
                (v for k, v in SIX.items() if k == stem),
                stem.replace("time_decay", "time_mix_decay"),
            )
            if new.endswith(("w1", "decay_w2")):
                tensor = tensor.T
            elif new == "time_mix_w2":
                tensor = tensor.mT
            yield f"{new}.{kind}", tensor.squeeze()


def layer_of_seven(own: Tensors, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    place = "attn" if any(name.startswith("attn.") for name in own) else "self_attn"
    fused = [own.pop(f"{place}.{one}") for one in SEVEN_FUSED if f"{place}.{one}" in own]
    yield "time_mix_lerp_fused.weight", torch.stack(fused)
    for name, tensor in own.items():
        if not name.startswith(f"{place}."):
            continue
        rest = name.removeprefix(f"{place}.")
        if match := re.fullmatch(r"(\w)_lora\.lora\.(0|2)\.(weight|bias)", rest):
            number = "1" if match[2] == "0" else "2" if match[3] == "weight" else "0"
            yield f"time_mix_{match[1]}{number}.weight", tensor
            if match[1] == "a" and layer == 0:  # stands for values, which the first layer has not
                yield f"time_mix_v{number}.weight", tensor
            continue
        stem, _, kind = rest.rpartition(".")
        stem, kind = (stem, kind) if stem else (kind, "weight")
        yield f"{SEVEN[stem]}.{kind}", tensor.flatten() if stem == "r_k" else tensor


def branches(name: str, own: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Norms and what stands behind the time mixing."""
    table = {
        **{
            "ln1": "attn_norm",
            "ln2": "attn_norm_2",
            "attn_norm": "attn_norm",
            "ffn_norm": "attn_norm_2",
        },
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
        **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
        **{f"feed_forward.{one}": f"channel_mix_{one}" for one in ("key", "value", "receptance")},
        **{f"ffn.{one}": f"channel_mix_{one}" for one in ("key", "value")},
        **{f"feed_forward.time_maa_{one}": f"channel_mix_lerp_{one}" for one in "kr"},
        "ffn.x_k": "channel_mix_lerp_k",
    }
    for key, tensor in own.items():
        stem, _, kind = key.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, kind = key, "weight"
        if stem in table:
            yield f"{table[stem]}.{kind}", tensor.squeeze()


def write(
    path: Path, name: str, *, rescale: int = 0, quantize: Any = None
) -> tuple[str, dict[str, Any], Tensors]:
    kind, module, config = CASES[name]
    weights = module.tensors(config)
    arch = gguf.MODEL_ARCH[kind]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"] or 224)
    writer.add_head_count(0)
    writer.add_wkv_head_size(config.get("head_size") or config["head_dim"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_token_shift_count(1)
    else:
        writer.add_layer_norm_eps(1e-5)
    if name == "rwkv6":
        writer.add_rescale_every_n_layers(rescale)
    if name == "rwkv6qwen2":
        writer.add_head_count_kv(config["num_key_value_heads"])
    top = {
        **{"embeddings": "token_embd", "embed_tokens": "token_embd", "ln_out": "output_norm"},
        **{"norm": "output_norm", "head": "output", "lm_head": "output"},
        **{"pre_norm": "token_embd_norm", "pre_ln": "token_embd_norm"},
    }
    found: Tensors = {}
    for key, tensor in weights.items():
        stem, kind = key.split(".")[-2:]
        if key.count(".") < 3 or stem.startswith("pre_"):
            found[f"{top[stem]}.{kind}"] = tensor
    for layer, (place, own) in enumerate(written(name, config, weights)):
        six = "6" in name
        for part, tensor in branches(name, dict(own)):
            found[f"{place}.{part}"] = tensor
        for part, tensor in layer_of_six(own) if six else layer_of_seven(own, layer):
            halved = part.startswith("time_mix_output") and rescale
            found[f"{place}.{part}"] = tensor / 2 ** (layer // rescale) if halved else tensor
        if rescale:
            value = f"{place}.channel_mix_value.weight"
            found[value] = found[value] / 2 ** (layer // rescale)
    known = {f"{gguf.TENSOR_NAMES[one]}" for one in gguf.MODEL_TENSORS[arch]}
    for key, tensor in found.items():
        stem = re.sub(r"^blk\.\d+\.", "blk.{bid}.", key.rpartition(".")[0])
        assert stem in known, key
        values = np.ascontiguousarray(tensor.numpy())
        big = quantize is not None and re.search(
            r"(key|value|receptance|output|gate)\.weight$", key
        )
        data, raw = quantize(key, values) if big and values.ndim == 2 else (values, None)
        writer.add_tensor(key, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path), config, weights


@pytest.mark.parametrize(
    ("name", "rescale"),
    [
        ("rwkv7", 0),
        *(
            pytest.param(name, rescale, marks=pytest.mark.slow)
            for name, rescale in (("rwkv6", 2), *((one, 0) for one in CASES if one != "rwkv7"))
        ),
    ],
)
def test_files_answer_as_the_reference(name: str, rescale: int, tmp_path: Path) -> None:
    path, config, weights = write(tmp_path / "m.gguf", name, rescale=rescale)
    model, _ = load(gguf_spec(Path(path)))
    for mine, row in zip(logits(model), ROWS, strict=True):
        theirs = CASES[name][1].logits(config, weights, row)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_big_matrices_may_be_quantized(tmp_path: Path) -> None:
    """Those of low rank are floats in files too."""
    path, *_ = write(tmp_path / "m.gguf", "rwkv7", quantize=library("Q8_0"))
    plain, *_ = write(tmp_path / "plain.gguf", "rwkv7")
    found, expected = (logits(load(gguf_spec(Path(one)))[0]) for one in (path, plain))
    for mine, theirs in zip(found, expected, strict=True):
        assert 0 < (mine - theirs).abs().max() < 0.2 * theirs.abs().max()
