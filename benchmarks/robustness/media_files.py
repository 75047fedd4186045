"""Hostile media files beside bystanders (P7, P10, T10): truncated, with spoiled bytes, of two formats at once, bombs of
pixels and frames, of wrong types, sounds of NaN, addresses that lead inside.

    nice -n 10 python -m benchmarks.robustness.media_files --files 5000 --write

A tiny model that sees is served with its default limits. Every file is a request of its own, six at a time; meanwhile
bystanders ask about one picture and must get the same answer each time. Counted are the statuses, what is no error of
the client's, restarts of processes, the bystanders' answers, and the memory of all processes before and behind.
"""

from __future__ import annotations

import argparse
import base64
import collections
import itertools
import json
import platform
import random
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.e2e.seeing import Seeing, image, served_seeing, text
from tests.front.media.pictures import animated, clip, encoded, picture

OUT = Path(__file__).with_suffix(".json")
AT_ONCE, BYSTANDERS = 6, 2
ADDRESSES = (
    *("http://127.0.0.1/a.png", "http://[::1]/", "http://169.254.169.254/latest", "http://0/"),
    *("http://2130706433/", "http://0x7f.1/", "http://localhost/", "http://[::ffff:127.0.0.1]/"),
    *("file:///etc/passwd", "gopher://127.0.0.1/", "http://a@127.0.0.1/", "data:image/png,%00"),
    *("ftp://127.0.0.1/a", "http://127.1/", "http://[fe80::1]/", "http:///a", "data:;base64,AA=="),
)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(min(width * height * 3 + height, 1 << 24)), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def wave(samples: np.ndarray, rate: int, *, form: int = 1) -> bytes:
    data = samples.tobytes()
    bits = samples.dtype.itemsize * 8
    head = struct.pack("<HHIIHH", form, 1, rate, rate * bits // 8 % 2**32, bits // 8, bits)
    body = (
        b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def whole_files() -> list[bytes]:
    """Good files, which are spoiled."""
    still = [encoded(picture(64, 48), form) for form in ("PNG", "JPEG", "WEBP", "GIF")]
    frames = [picture(24, 24, seed) for seed in range(6)]
    moving = [animated(frames, form, 100) for form in ("PNG", "GIF", "WEBP")]
    video = clip([picture(48, 32, seed) for seed in range(12)], Fraction(10))
    return [
        *still,
        *moving,
        video,
        b"%PDF-1.4\n" + bytes(200),
        wave(np.zeros(1600, np.int16), 16_000),
    ]


def bombs() -> list[bytes]:
    quiet = np.full(800, np.nan, np.float32)
    many = animated([picture(4, 4, seed % 7) for seed in range(400)], "GIF", 20)
    return [
        *(png_bomb(*size) for size in ((100_000, 100_000), (60_000, 40), (1, 2**31 - 1), (0, 9))),
        *(wave(quiet, rate, form=3) for rate in (16_000, 0, 2**31)), wave(quiet[:0], 16_000, form=3),
        many, b"", b"\x00" * 4096, b"<svg onload='x'/>" * 9, b"#EXTM3U\nhttp://127.0.0.1/a.ts\n",
        b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\xf7\x00\x00" + bytes(768),
    ]  # fmt: skip


def hostile_files(seed: int) -> Iterator[bytes]:
    """Without end, always the same."""
    chance = random.Random(seed)
    good, evil = whole_files(), bombs()
    for number in itertools.count():
        data = bytearray(chance.choice(good))
        match number % 5:
            case 0:
                yield chance.choice(evil)
            case 1:
                yield bytes(data[: chance.randrange(len(data))])
            case 2:
                for _ in range(chance.randrange(1, 40)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                yield bytes(data)
            case 3:
                yield bytes(data[: chance.randrange(1, 200)]) + chance.choice(good)
            case _:
                at = chance.randrange(len(data))
                yield bytes(data[:at]) + chance.randbytes(chance.randrange(600)) + bytes(data[at:])


def part_of(number: int, data: bytes) -> dict[str, Any]:
    """As an image, a video, a document or a sound; every thirtieth is an address."""
    if number % 30 == 7:
        return {"type": "image_url", "image_url": {"url": ADDRESSES[number // 30 % len(ADDRESSES)]}}
    told = base64.b64encode(data).decode()
    match number % 7:
        case 5:
            return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{told}"}}
        case 6:
            return {"type": "input_audio", "input_audio": {"data": told, "format": "wav"}}
        case 4:
            file = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{told}"}
            return {"type": "file", "file": file}
        case _:
            return image(data)


def memory_mib(seeing: Seeing) -> float:
    total = 0
    for process in (psutil.Process(seeing.served.process.pid), *seeing.served.children):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


def pids(seeing: Seeing) -> set[int]:
    return {process.pid for process in (*seeing.served.cores, *seeing.served.api_processes)}


def measure(seeing: Seeing, count: int, seed: int) -> dict[str, Any]:
    """Sends the files; see the module."""
    parts = [image(encoded(picture(40, 24))), text("what is in the image?")]
    expected = seeing.ask(*parts).choices[0].message.content
    answers: collections.Counter[bool] = collections.Counter()
    statuses: collections.Counter[int] = collections.Counter()
    odd: list[dict[str, Any]] = []
    over = threading.Event()

    def bystand(_: int) -> None:
        while not over.is_set():
            answers[seeing.ask(*parts).choices[0].message.content == expected] += 1
            over.wait(0.2)

    def attack(numbered: tuple[int, bytes]) -> None:
        number, data = numbered
        message = {"role": "user", "content": [part_of(number, data), text("x")]}
        body = {"messages": [message], "max_tokens": 1}
        answer = httpx.post(f"{seeing.served.url}/v1/chat/completions", json=body, timeout=120)
        statuses[answer.status_code] += 1
        if answer.status_code not in (200, 400, 413) and len(odd) < 20:
            odd.append({"number": number, "status": answer.status_code, "body": answer.text[:300]})

    before, memory, start = pids(seeing), memory_mib(seeing), time.monotonic()
    files = itertools.islice(enumerate(hostile_files(seed)), count)
    with ThreadPoolExecutor(BYSTANDERS) as beside, ThreadPoolExecutor(AT_ONCE) as pool:
        asking = [beside.submit(bystand, one) for one in range(BYSTANDERS)]
        try:
            for done in range(0, count, 100):
                list(pool.map(attack, itertools.islice(files, 100)))
                if done % 1000 == 0:
                    print(
                        f"{done + 100} files, {time.monotonic() - start:.0f} s",
                        dict(statuses),
                        flush=True,
                    )
        finally:
            over.set()
        for one in asking:
            one.result()
    return {
        "files": count,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "statuses": {str(key): value for key, value in sorted(statuses.items())},
        "other statuses": odd,
        "bystanders": {"as expected": answers[True], "otherwise": answers[False]},
        "processes replaced": len(before - pids(seeing)),
        "memory MiB before and behind": [round(memory), round(memory_mib(seeing))],
        "machine": platform.processor() or platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {OUT.name}")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served_seeing(Path(folder) / "seeing") as seeing,
    ):
        result = measure(seeing, options.files, options.seed)
    print(json.dumps(result, indent=1))
    if options.write:
        OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
