"""Encoders on one GPU, launched kernel by kernel and in graphs by size (headrace/back/runner/encoder_graphs.py): dummy
bfloat16 weights at true widths, one input and several.

    python -m benchmarks.h200.encoders --out encoders.json

`plain_ms`, `recorded_ms`: from the call to the last row on the device, medians of turns in turn; `host_ms`: what the
calling thread is held by the plain pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.shapes import device_name
from headrace.back.layers.vision.encoder import Grid, MediaEncoder
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner import encoder_graphs
from headrace.back.runner.encoder_graphs import RecordedEncoder, graphs_on
from headrace.base.config.resolved import ModelSpec
from headrace.bench.report import versions

TURNS = 15
FAMILIES = {"image": "qwen3_vl", "audio": "qwen2_audio"}
ONE_LAYER: dict[str, Any] = {
    **{"num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 12288},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}
AUDIO = {
    **{"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20},
    **{"encoder_ffn_dim": 5120},
}


def qwen3_vl(small: bool) -> dict[str, Any]:
    """The tower of Qwen3-VL-8B: 27 layers of 1152."""
    vision = {
        **{"model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
        **{"num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{"out_hidden_size": 4096, "num_position_embeddings": 2304, "in_channels": 3},
        **{"deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh"},
    }
    text = {**ONE_LAYER, "model_type": "qwen3_vl_text", "rms_norm_eps": 1e-6}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    if small:
        vision |= {"depth": 3, "deepstack_visual_indexes": [0, 1], "hidden_size": 64}
        vision |= {"num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
        text |= {"hidden_size": 64, "intermediate_size": 64}
    named = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    marks = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
    return {**named, **marks, "vision_config": vision, "text_config": text}


def qwen2_audio(small: bool) -> dict[str, Any]:
    """Whisper-large's encoder before a decoder's width."""
    audio = {**AUDIO, "num_mel_bins": 128, "max_source_positions": 1500}
    text = {key: value for key, value in ONE_LAYER.items() if key != "head_dim"}
    if small:
        audio |= {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4}
        audio |= {"encoder_ffn_dim": 96}
        text |= {"hidden_size": 64, "intermediate_size": 64}
    named = {"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"}
    text |= {"model_type": "qwen2"}
    return {**named, "audio_token_index": 151646, "audio_config": audio, "text_config": text}


CASES: dict[str, tuple[Callable[[bool], Any], str, tuple[list[Grid], ...]]] = {
    "Qwen3-VL-8B": (
        qwen3_vl,
        "image",
        ([(1, 16, 16)], [(1, 16, 16)] * 8, [(1, 32, 32)], [(1, 64, 64)], [(1, 40, 50)] * 2),
    ),
    "Qwen2-Audio-7B": (qwen2_audio, "audio", ([(1, 1, 500)], [(1, 1, 1500)], [(1, 1, 3000)])),
}


def encoder_of(config: dict[str, Any], kind: str, device: torch.device) -> MediaEncoder:
    """With dummy weights."""
    spec = ModelSpec(
        path="", name="encoders", format="dummy", family=FAMILIES[kind], dtype="bfloat16",
        max_model_len=4096, logits_width=151936, eos_ids=(), config=config,
    )  # fmt: skip
    model, _ = load_model(spec, mesh=Mesh(), device=device, block_tokens=16)
    assert model.media is not None
    return model.media


def seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Until the device is done, and until the call returns."""
    _wait(device)
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin
    _wait(device)
    return time.perf_counter() - begin, host


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def main() -> None:
    """Prints a line for each case, and writes all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="tiny widths, on a CPU: a trial")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.small else "cuda:0")
    rows: list[dict[str, Any]] = []
    for name, (make, kind, inputs) in CASES.items():
        encoder = encoder_of(make(arguments.small), kind, device)
        form = next(form for form in encoder.forms if form.kind == kind)
        graphs = graphs_on(device)
        recorded = encoder if graphs is None else RecordedEncoder(encoder, graphs)
        for grids in inputs:
            size = sum(t * h * w for t, h, w in grids)
            raw = torch.randn(size, form.row_bytes // 4, device=device).view(torch.uint8)
            if kind == "image":
                raw = torch.randint(256, (size, form.row_bytes), dtype=torch.uint8, device=device)
            calls = {
                "plain": lambda e=encoder, r=raw, g=grids, k=kind: e.encode(k, r, g),
                "recorded": lambda e=recorded, r=raw, g=grids, k=kind: e.encode(k, r, g),
            }
            times: dict[str, list[tuple[float, float]]] = {key: [] for key in calls}
            for turn in range(TURNS + 3):
                for key, call in calls.items():
                    one = seconds(call, device)
                    if turn >= 3:
                        times[key].append(one)
            plain, ours = (
                statistics.median(one for one, _ in times[key]) for key in ("plain", "recorded")
            )
            rows.append(
                {
                    "tower": name,
                    "inputs": len(grids),
                    "rows": size,
                    "plain_ms": round(1000 * plain, 3),
                    "recorded_ms": round(1000 * ours, 3),
                    "host_ms": round(1000 * statistics.median(one for _, one in times["plain"]), 3),
                    "faster": round(plain / ours, 3),
                    "graphs": 0 if graphs is None else graphs.num_graphs,
                    "graph_mib": 0 if graphs is None else graphs.num_bytes >> 20,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    found: dict[str, Any] = {**versions(), **device_name(), "most_rows": encoder_graphs.MOST_ROWS}
    arguments.out.write_text(json.dumps(found | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
