"""Writes the held-out items of the model that sees: texts that are never trained, scenes of other seeds.

python -m demo.sees.freeze --fonts fonts
python -m demo.sees.freeze --fonts fonts --seed 7 --count 400 --out more.jsonl.gz
"""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np

from demo.sees.item import Clip, Medium, Showing
from demo.sees.shapes import comparing, counting, in_order, placing
from demo.sees.texts import Fonts, reading
from headrace.bench.held_out import SEEN, AnswerCheck, EvalItem, write_items

TASKS = (
    "read_word", "read_number", "read_line", "read_lines", "count", "name", "place", "relation", "compare", "order",
)  # fmt: skip


def frozen_items(task: str, count: int, seed: int, fonts: Fonts) -> list[EvalItem]:
    """The first items of a task that its makers make."""
    rng = Random(f"held out {task} {seed}")
    makers: dict[str, Callable[[], Showing]] = {
        "count": lambda: counting(rng), "compare": lambda: comparing(rng), "order": lambda: in_order(rng),
        "name": lambda: placing(rng), "place": lambda: placing(rng), "relation": lambda: placing(rng),
    }  # fmt: skip
    make = makers.get(task, lambda: reading(rng, fonts, held_out=True))
    items: list[EvalItem] = []
    while len(items) < count:
        showing = make()
        turn = next((turn for turn in showing.turns if turn.task == task), None)
        if turn is not None:
            items.append(_item(showing, task, turn.question, turn.answer))
    return items


def _item(showing: Showing, task: str, question: str, answer: str) -> EvalItem:
    content = [*map(_part, showing.media), {"type": "text", "text": question}]
    return EvalItem(
        task=task, messages=[{"role": "user", "content": content}], check=AnswerCheck.EXACT, expected=answer,
        reference=answer, max_tokens=len(answer.encode()) + 16, thinking=None,
    )  # fmt: skip


def _part(medium: Medium) -> dict[str, Any]:
    if isinstance(medium, Clip):
        return {"type": "video_url", "video_url": {"url": _url("video/mp4", clip_file(medium))}}
    data = io.BytesIO()
    medium.save(data, "PNG", optimize=True)
    return {"type": "image_url", "image_url": {"url": _url("image/png", data.getvalue())}}


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def clip_file(clip: Clip) -> bytes:
    """The clip as an H.264 file."""
    data = io.BytesIO()
    width, height = clip.frames[0].size
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=round(clip.rate), options={"crf": "22"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in clip.frames:
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24"))
            )
        container.mux(stream.encode())
    return data.getvalue()


def main() -> None:
    """Writes the file and says how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fonts", type=Path, required=True, help="a folder of .ttf and .otf files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="items per task")
    parser.add_argument("--out", type=Path, default=SEEN)
    arguments = parser.parse_args()
    fonts = Fonts(arguments.fonts)
    items = [
        i for task in TASKS for i in frozen_items(task, arguments.count, arguments.seed, fonts)
    ]
    write_items(arguments.out, items, seed=arguments.seed)
    print(f"{arguments.out}: {len(items)} items, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
