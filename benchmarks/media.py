"""What an image costs the host: from the bytes of a JPEG to patches in the API process.

python -m benchmarks.media [--repeat N]
"""

from __future__ import annotations

import argparse
import io
import time

import numpy as np
from PIL import Image

from headrace.base.config.media import ProcessorSettings
from headrace.front.media import decoders
from headrace.front.media.job import DecodingLimits, MediaJob
from headrace.front.media.jobs import MediaProcesses
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor

FAMILIES = {
    "Qwen2.5-VL": ProcessorSettings(image_pixels=(56 * 56, 16384 * 28 * 28)),
    "Qwen3-VL": ProcessorSettings(patch=16, image_pixels=(65536, 16777216)),
}
SIZES = ((256, 256), (1024, 1024), (1920, 1080))


def jpeg(width: int, height: int) -> bytes:
    """A picture with edges and noise, of quality 90."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = smooth + rng.integers(-8, 9, smooth.shape, dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def measured(
    processes: MediaProcesses, settings: ProcessorSettings, data: bytes, count: int
) -> list[float]:
    """Seconds of each run."""
    job = MediaJob(
        kind="image",
        family="qwen_vl",
        settings=settings,
        limits=processes.limits,
        sizes=(len(data),),
    )
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        processes.run(job, [data])
        times.append(time.perf_counter() - begin)
    return sorted(times)


def processor_ms(settings: ProcessorSettings, data: bytes, count: int) -> float:
    """The least processor time of decoding and processing alone, which others' load does not change."""
    processor, times = QwenVisionProcessor(settings), []
    for _ in range(count):
        begin = time.thread_time()
        decoders.image(data, processor, DecodingLimits())
        times.append(time.thread_time() - begin)
    return 1e3 * min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    count = parser.parse_args().repeat
    processes = MediaProcesses(DecodingLimits(), size=1)
    print("| | " + " | ".join(f"{w} x {h}" for w, h in SIZES) + " |\n|---|" + "---|" * len(SIZES))
    for name, settings in FAMILIES.items():
        cells = []
        for size in SIZES:
            data = jpeg(*size)
            times = measured(processes, settings, data, count)
            middle, alone = 1e3 * times[len(times) // 2], processor_ms(settings, data, count)
            cells.append(f"{1e3 * times[0]:.1f} ms (median {middle:.1f}; processor {alone:.1f})")
        print(f"| {name} | " + " | ".join(cells) + " |")
    processes.close()


if __name__ == "__main__":
    main()
