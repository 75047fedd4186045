"""Speech to text on one GPU: Whisper-large-v3's shape with dummy bfloat16 weights, batches of windows of 30 s, so many
tokens of text each, greedy; the spectrograms are ready.

    python -m benchmarks.h200.speech --out speech.json [--windows 64] [--tokens 96] [--turns 3] [--alone 1,8]

`times_real`: seconds of sound over wall seconds, the median of the turns. `encoder_share`: what a batch of one token a
window takes, less a step of the decoder, over the whole. `alone`: smaller batches, where launches weigh more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.h200.shapes import device_name
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
)
from headrace.base.wire.request import EngineRequest
from headrace.bench.offline import OfflineEngine
from headrace.bench.report import versions
from headrace.launch.facts import resolve_options

SHAPES = {"large-v3": (1280, 32, 20, 128, 51866), "tiny": (384, 4, 6, 80, 51865)}
"""Width, layers of either half, heads, bands, vocabulary."""
FRAMES, WINDOW_S = 3000, 30
START = (50258, 50259, 50360, 50364)
BAR = 2400.0


def write_model(folder: Path, shape: str) -> Path:
    """What `--load-format dummy` needs of a checkpoint."""
    width, layers, heads, bands, vocabulary = SHAPES[shape]
    config = {
        **{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
        **{"d_model": width, "encoder_layers": layers, "decoder_layers": layers},
        **{"encoder_attention_heads": heads, "decoder_attention_heads": heads},
        **{"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, "num_mel_bins": bands},
        **{"vocab_size": vocabulary, "decoder_start_token_id": START[0], "eos_token_id": 50257},
        **{"max_source_positions": FRAMES // 2, "max_target_positions": 448, "dtype": "bfloat16"},
        **{"activation_function": "gelu", "num_hidden_layers": layers},
    }
    extractor = {
        **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bands},
        **{"chunk_length": WINDOW_S, "hop_length": 160, "n_fft": 400, "sampling_rate": 16000},
        **{"n_samples": 480_000, "nb_max_frames": FRAMES},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return folder


def make_engine(folder: Path, device: str, windows: int, kv_dtype: Any) -> OfflineEngine:
    """As a server of this model would be, with room for all windows at once."""
    memory: Any = "auto" if device == "auto" else "1GiB"
    options = Options(
        model=ModelOptions(model=str(folder), load_format="dummy"),
        kv=KVOptions(prefix_caching=False, kv_memory=memory, kv_dtype=kv_dtype),
        scheduler=SchedulerOptions(max_running=max(16, windows)),
        device=DeviceOptions(device=device),
    )
    return OfflineEngine(resolve_options(options))


def requests_of(engine: OfflineEngine, shape: str, count: int, tokens: int) -> list[EngineRequest]:
    """So many windows, each of its own sound."""
    rng, bands = np.random.default_rng(0), SHAPES[shape][3]
    return [
        msgspec.structs.replace(
            engine.request(rng, len(START), tokens, 0.0),
            prompt=np.asarray(START, "<i4").tobytes(),
            encoder=rng.normal(0.0, 0.5, (bands, FRAMES)).astype(np.float32).tobytes(),
        )
        for _ in range(count)
    ]


def heard(
    engine: OfflineEngine, shape: str, count: int, tokens: int, turns: int
) -> tuple[float, float]:
    """Median seconds of a batch, and of a step that only decodes."""
    walls, steps = [], []
    for turn in range(turns + 2):  # sizes are met, then recorded, then replayed
        requests = requests_of(engine, shape, count, tokens)
        begin = time.perf_counter()
        trace = engine.run(requests)
        if turn >= 2:
            walls.append(time.perf_counter() - begin)
            steps += np.diff(trace.times_s[-tokens // 2 :]).tolist()
    return statistics.median(walls), statistics.median(steps) if steps else 0.0


def main() -> None:
    """Prints a line for each batch, and writes all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="large-v3")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kv-dtype", default="auto", help="of both caches: auto, fp8")
    parser.add_argument("--alone", default="1,8", help="smaller batches, with commas")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place), arguments.shape)
        engine = make_engine(folder, arguments.device, arguments.windows, arguments.kv_dtype)
        for count in (arguments.windows, *(int(one) for one in arguments.alone.split(",") if one)):
            shape, tokens, turns = arguments.shape, arguments.tokens, arguments.turns
            wall, step = heard(engine, shape, count, tokens, turns)
            one, _ = heard(engine, shape, count, 1, turns)
            row = {
                "shape": shape,
                "kv_dtype": arguments.kv_dtype,
                "windows": count,
                "tokens": tokens,
                "wall_s": round(wall, 4),
                "decode_step_ms": round(1000 * step, 3),
                "encode_s": round(one, 4),
                "encoder_share": round(one / wall, 3),
                "times_real": round(count * WINDOW_S / wall),
                "bar": BAR if count == 64 and shape == "large-v3" else None,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
        engine.close()
    found: dict[str, Any] = {**versions(), **device_name()}
    found |= {"rows": rows, "start_s": engine.start_s}
    arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
