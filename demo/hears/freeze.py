"""Writes the held-out items of the model that hears: voices that are never heard in training, and phrases that are
never said there (commands are few, and are the same).

python -m demo.hears.freeze
python -m demo.hears.freeze --seed 7 --count 400 --out more.jsonl.gz
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from demo.hears.voices import RATE
from demo.hears.windows import Studio, Window, text_of
from headrace.bench.held_out import HEARD, AnswerCheck, EvalItem, write_items

TASKS = {
    "en": ("en", False),
    "en_noise": ("en", True),
    "de": ("de", False),
    "de_noise": ("de", True),
}
"""Task -> language, and whether there is noise (10 to 20 dB below the voice)."""
BITS = 24_000
"""Of a second of sound."""


def frozen_items(task: str, count: int, seed: int) -> list[EvalItem]:
    """One or two phrases each."""
    language, noisy = TASKS[task]
    studio = Studio(f"held out {task} {seed}", held_out=True)
    items = []
    for number in range(count):
        window = studio.window(language, 1 + (number % 4 == 3), noisy=noisy)
        text = text_of(window)
        items.append(
            EvalItem(
                task=task, messages=[], check=AnswerCheck.WORDS, expected=text, reference=text, max_tokens=96,
                audio=opus(_ending(window)), language=language, thinking=None,
            )
        )  # fmt: skip
    return items


def _ending(window: Window) -> npt.NDArray[np.int16]:
    """The window until shortly after the last word."""
    at, last = window.said[-1]
    return window.wave[: round((at + 0.5) * RATE) + len(last.wave)]


def opus(samples: npt.NDArray[np.int16]) -> bytes:
    """The samples as an Ogg file."""
    data = io.BytesIO()
    with av.open(data, "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=48_000, layout="mono")
        stream.bit_rate = BITS
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.rate = RATE
        resampler = av.AudioResampler(
            format=stream.format, layout="mono", rate=48_000, frame_size=960
        )
        for piece in (frame, None):
            for one in resampler.resample(piece):
                container.mux(stream.encode(one))
        container.mux(stream.encode(None))
    return data.getvalue()


def main() -> None:
    """Writes the file and says how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=25, help="items per task")
    parser.add_argument("--out", type=Path, default=HEARD)
    arguments = parser.parse_args()
    items = [i for task in TASKS for i in frozen_items(task, arguments.count, arguments.seed)]
    write_items(arguments.out, items, seed=arguments.seed)
    print(f"{arguments.out}: {len(items)} items, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
