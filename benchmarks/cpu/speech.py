"""Speech to text on a CPU beside CTranslate2, the engine of faster-whisper.

Windows of 30 s, 96 tokens of text each, one after another and several at a time. Both run the same random weights of
Whisper's shape in the same type; turns are interleaved, and processor seconds are told beside wall seconds, as other
work may run on the machine.

python -m benchmarks.cpu.speech --peer FOLDER [--shape base] [--type float32] [--windows 4] [--turns 3]

FOLDER: where ctranslate2 and pyyaml lie (pip install --no-deps --target FOLDER ctranslate2 pyyaml).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from headrace.base.config.options import CommandLine
from headrace.bench.offline import OfflineEngine
from headrace.launch.facts import resolve_options

SHAPES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
"""Width, layers of either half, heads."""
BANDS, FRAMES, TOKENS = 80, 3000, 96
START = (50258, 50259, 50359, 50363)
END = 50257
WINDOW_S = 30
Hear = Callable[[int], None]


def checkpoint(shape: str, folder: Path) -> None:
    """Random weights in transformers' layout, in float32."""
    width, layers, heads = SHAPES[shape]
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        num_mel_bins=BANDS, vocab_size=51865, decoder_start_token_id=START[0], eos_token_id=END,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.no_timestamps_token_id = START[-1]
    model.generation_config.alignment_heads = [[0, 0]]
    model.generation_config.lang_to_id = {"<|en|>": START[1]}
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=BANDS).save_pretrained(folder)


def spectrograms(count: int) -> np.ndarray:
    """float32 [count, bands, frames], as loud as speech is."""
    return np.random.default_rng(0).normal(0.0, 0.5, (count, BANDS, FRAMES)).astype(np.float32)


def headrace(folder: Path, kind: str, threads: int) -> tuple[Hear, Callable[[], None]]:
    """Ours: the core and its worker in this process."""
    words = [
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--threads",
        str(threads),
        "--max-running",
        "16",
    ]
    words += ["--no-prefix-caching", "--kv-memory", "2GiB"]
    words += (
        ["--dtype", "float32"]
        if kind == "float32"
        else ["--dtype", "bfloat16", "--quantization", "int8"]
    )
    line = CommandLine("speech", "", groups=("model", "kv", "scheduler", "device"))
    _, options = line.parse(words)
    engine, rng = OfflineEngine(resolve_options(options)), np.random.default_rng(0)

    def hear(count: int) -> None:
        requests = [
            msgspec.structs.replace(
                engine.request(rng, len(START), TOKENS, 0.0),
                prompt=np.asarray(START, "<i4").tobytes(),
                encoder=one.tobytes(),
            )
            for one in spectrograms(count)
        ]
        engine.run(requests)

    return hear, engine.close


def ctranslate2(
    peer: Path, folder: Path, kind: str, threads: int
) -> tuple[Hear, Callable[[], None]]:
    """Theirs, from the same weights, greedy."""
    sys.path.append(str(peer))
    library: Any = __import__("ctranslate2")
    converters: Any = __import__("ctranslate2.converters", fromlist=["TransformersConverter"])
    made = folder.with_name("ctranslate2")
    # Their loader wants a tokenizer, which nothing here reads.
    converter = converters.TransformersConverter(str(folder))
    converter.load_tokenizer = lambda cls, name, **more: _NoTokenizer()
    converter.convert(str(made), force=True)
    model = library.models.Whisper(
        str(made), device="cpu", compute_type="float32" if kind == "float32" else "int8",
        inter_threads=1, intra_threads=threads,
    )  # fmt: skip

    def hear(count: int) -> None:
        features = library.StorageView.from_array(spectrograms(count))
        told = model.generate(
            features, [list(START)] * count, beam_size=1, max_length=2 * TOKENS,
            suppress_tokens=[END], suppress_blank=False,
        )  # fmt: skip
        counts = {len(one.sequences_ids[0]) for one in told}
        assert counts == {TOKENS}, counts

    return hear, lambda: None


class _NoTokenizer:
    """A vocabulary of the right size."""

    def get_vocab(self) -> dict[str, int]:
        named = {i: f"t{i}" for i in range(51865)}
        named |= {END: "<|endoftext|>", START[0]: "<|startoftranscript|>", START[1]: "<|en|>"}
        named |= {START[2]: "<|transcribe|>", START[3]: "<|notimestamps|>", 50362: "<|nospeech|>"}
        return {token: i for i, token in named.items()}

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return START[0]

    unk_token, bos_token, eos_token, additional_special_tokens = "t0", "t0", "t50257", []


def timed(hear: Hear, count: int, *, apart: bool) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    for each in [1] * count if apart else [count]:
        hear(each)
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Prints a line for each way, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--type", choices=("float32", "int8"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        checkpoint(arguments.shape, folder)
        engines = {
            "ctranslate2": ctranslate2(arguments.peer, folder, arguments.type, arguments.threads),
            "headrace": headrace(folder, arguments.type, arguments.threads),
        }
        times: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for hear, _ in engines.values():
            hear(1)
        for _ in range(arguments.turns):
            for name, (hear, _) in engines.items():
                for apart in (True, False):
                    each = timed(hear, arguments.windows, apart=apart)
                    times.setdefault((name, apart), []).append(each)
        for apart in (True, False):
            row: dict[str, Any] = {"shape": arguments.shape, "type": arguments.type, "apart": apart}
            for name in engines:
                walls, processors = zip(*times[name, apart], strict=True)
                heard = arguments.windows * WINDOW_S
                row[name] = {
                    "wall_s": round(statistics.median(walls), 3),
                    "processor_s": round(statistics.median(processors), 3),
                    "times_real": round(heard / statistics.median(walls), 1),
                }
            for what in ("wall_s", "processor_s"):
                row[f"ratio_{what}"] = round(row["ctranslate2"][what] / row["headrace"][what], 2)
            print(json.dumps(row))
        for _, close in engines.values():
            close()


if __name__ == "__main__":
    main()
