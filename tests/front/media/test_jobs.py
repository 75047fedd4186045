"""Media decoded in processes of their own: what comes back, and what a hostile file costs."""

from __future__ import annotations

import io
import os
import signal
import struct
import threading
import wave
import zlib
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from headrace.base.config.media import ProcessorSettings
from headrace.base.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.front.media.job import DecodingLimits, MediaJob
from headrace.front.media.jobs import MediaProcesses
from headrace.front.media.processing import ProcessedMedia, Sampling
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor
from headrace.front.media.sound import samples_of
from tests.front.media.pictures import animated, clip, encoded, picture

LIMITS = DecodingLimits(pixels=4_000_000, frames=300, pages=3, time_s=60.0)
SETTINGS = ProcessorSettings(
    patch=4,
    video_pixels=(64, 10**6),
    image_pixels=(64, 10**6),
    pixels_of_all_frames=True,
    stamped=True,
)
OURS = QwenVisionProcessor(SETTINGS)


@pytest.fixture(scope="module")
def processes() -> Iterator[MediaProcesses]:
    processes = MediaProcesses(LIMITS, size=1)
    yield processes
    processes.close()


def run(processes: MediaProcesses, kind: str, *files: bytes) -> list[ProcessedMedia]:
    job = MediaJob(
        kind=kind,
        family="qwen_vl",
        settings=SETTINGS,
        limits=processes.limits,
        sizes=tuple(map(len, files)),
    )
    return processes.run(job, files)


def same(one: ProcessedMedia, other: ProcessedMedia) -> bool:
    assert one.layout == other.layout
    assert [i.grid for i in one.inputs] == [i.grid for i in other.inputs]
    assert [i.step_s for i in one.inputs] == [i.step_s for i in other.inputs]
    pairs = zip(one.inputs, other.inputs, strict=True)
    return all(np.array_equal(a.rows, b.rows) for a, b in pairs)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_comes_back_as_processed_here(processes: MediaProcesses, form: str) -> None:
    data = encoded(picture(61, 43), form)
    (medium,) = run(processes, "image", data)
    assert same(medium, OURS.image(Image.open(io.BytesIO(data)).convert("RGB")))


def test_an_image_is_turned_as_its_orientation_says(processes: MediaProcesses) -> None:
    """P27."""
    turn = Image.Transpose
    stored = (
        *(None, turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM),
        *(turn.TRANSPOSE, turn.ROTATE_90, turn.TRANSVERSE, turn.ROTATE_270),
    )
    upright = picture(64, 32)
    for orientation, how in enumerate(stored, start=1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(upright if how is None else upright.transpose(how), "PNG", exif=exif)
        assert same(run(processes, "image", data)[0], OURS.image(upright)), orientation


def test_colours_that_stand_for_nothing_are_white_and_ink_is_seen_as_light(
    processes: MediaProcesses,
) -> None:
    """P27: the colour that tRNS names, of greys and of colours; CMYK, 16 x 16 pixels."""
    for mode, nothing, ink in (("L", 7, 90), ("RGB", (255, 0, 0), (0, 0, 255)), ("P", 0, 1)):
        image = Image.new(mode, (16, 16), nothing)
        image.paste(ink, (0, 0, 8, 16))
        rows = (
            run(processes, "image", encoded(image, "PNG", transparency=nothing))[0].inputs[0].rows
        )
        assert rows[-1].min() == 255 and rows[0].min() < 255, mode
    print_ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    data = encoded(print_ink, "JPEG", quality=100)
    expected = OURS.image(Image.open(io.BytesIO(data)).convert("RGB"))
    assert same(run(processes, "image", data)[0], expected)


def test_channels_are_mixed_by_their_places(processes: MediaProcesses) -> None:
    """P27, of 5.1: by ITU-R BS.775, what is heard in the middle is louder than at the sides, and of the
    effects of low frequency nothing is left, where a mean would have them all alike."""
    tone = (20000 * np.sin(np.arange(1600) * 0.2)).astype("<i2")
    levels = []
    for channel in range(6):
        samples = np.zeros((1600, 6), "<i2")
        samples[:, channel] = tone
        data = io.BytesIO()
        with wave.open(data, "wb") as file:
            file.setnchannels(6)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.tobytes())
        content = data.getvalue()
        job = MediaJob(
            kind="audio",
            family="",
            settings=ProcessorSettings(),
            limits=processes.limits,
            sizes=(len(content),),
        )
        heard = samples_of(processes.run(job, [content])[0])
        levels.append(float(heard.astype(float) @ tone) / float(tone.astype(float) @ tone))
    front, middle, back = 0.7071, 1.0, 0.5
    weights = np.array([front, front, middle, 0.0, back, back])
    assert np.abs(np.array(levels) - weights / weights.sum()).max() < 2e-3, levels


def test_what_is_transparent_is_white(processes: MediaProcesses) -> None:
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    clear.paste((0, 0, 255, 255), (0, 0, 8, 16))
    for image in (clear, clear.convert("P"), clear.convert("LA")):
        rows = run(processes, "image", encoded(image))[0].inputs[0].rows
        assert rows[-1].min() == 255 and rows[0].min() < 255


def test_deep_greys_keep_their_upper_bits(processes: MediaProcesses) -> None:
    greys = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    data = encoded(Image.fromarray(greys))
    image = Image.fromarray((greys / 257.0).astype(np.uint8)).convert("RGB")
    assert same(run(processes, "image", data)[0], OURS.image(image))


def test_of_an_animation_an_image_is_the_first_frame(processes: MediaProcesses) -> None:
    frames = [picture(32, 32, i) for i in range(3)]
    data = animated(frames, "WEBP", 100)
    first = Image.open(io.BytesIO(data)).convert("RGB")
    assert same(run(processes, "image", data)[0], OURS.image(first))


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "mpeg4"), ("avi", "mjpeg"), ("matroska", "mpeg4"), ("mpegts", "mpeg2video")]
)  # fmt: skip
def test_frames_of_a_video_are_sampled_by_its_rate(
    processes: MediaProcesses, container: str, codec: str
) -> None:
    """24 frames a second, of which two are taken: each has a grey level of its own."""
    images = [Image.new("RGB", (64, 48), (10 * (i // 6), 10 * (i // 6), 0)) for i in range(144)]
    data = clip(images, Fraction(24), container=container, codec=codec)
    (medium,) = run(processes, "video", data)
    indices = OURS.frames_of(Sampling(144, 24.0))
    assert len(indices) == 12 and len(medium.inputs) == 6
    assert [each for each in medium.layout if isinstance(each, int)] == list(range(6))
    assert medium.layout[0] == f"<{(indices[0] + indices[1]) / 48:.1f} seconds><|vision_start|>"
    for i, one in enumerate(medium.inputs):
        reds = one.rows.reshape(-1, 3, 2, 16)[:, 0].mean(axis=(0, 2))
        levels = [10 * (indices[2 * i + j] // 6) for j in (0, 1)]
        assert np.abs(reds - levels).max() < 8, (i, reds, levels)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_a_video_by_its_durations(processes: MediaProcesses, form: str) -> None:
    frames = [Image.new("RGB", (32, 32), (20 * i, 0, 0)) for i in range(12)]
    (medium,) = run(processes, "video", animated(frames, form, 250))
    indices = OURS.frames_of(Sampling(12, 4.0))
    assert len(medium.inputs) == len(indices) // 2
    assert medium.layout[0] == f"<{(indices[0] + indices[1]) / 8:.1f} seconds><|vision_start|>"


def test_frames_sampled_by_a_client_are_all_taken(processes: MediaProcesses) -> None:
    """MUL-02."""
    images = [picture(32, 24, i) for i in range(5)]
    (medium,) = run(processes, "frames", *[encoded(image) for image in images])
    assert same(medium, OURS.video(images, range(5), Sampling(5, 2.0)))
    with pytest.raises(InvalidRequest, match="frames of 32 x 24 and of 24 x 32 pixels given"):
        run(processes, "frames", encoded(images[0]), encoded(picture(24, 32)))


def test_pages_of_a_document_are_images(processes: MediaProcesses) -> None:
    sheets = [picture(120, 90, i) for i in range(3)]
    data = encoded(sheets[0], "PDF", save_all=True, append_images=sheets[1:], resolution=72.0)
    media = run(processes, "pages", data)
    assert [medium.inputs[0].grid for medium in media] == [
        OURS.image(picture(240, 180)).inputs[0].grid
    ] * 3
    more = encoded(sheets[0], "PDF", save_all=True, append_images=sheets * 2)
    with pytest.raises(InvalidRequest, match="7 pages given; at most 3 are allowed"):
        run(processes, "pages", more)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))


HOSTILE = {
    "bomb": ("image", png(50_000, 50_000), "far more than 4000000 pixels given"),
    "large": ("image", png(5_000, 5_000), "5000 x 5000 pixels given; at most 4000000"),
    "no pixels": ("image", png(0, 7), "none of PNG"),
    "truncated": ("image", encoded(picture(90, 90), "JPEG")[:700], "cannot be decoded"),
    "empty": ("image", b"", "none of PNG, JPEG, WEBP, GIF"),
    "svg": ("image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
    "tiff": ("image", encoded(picture(9, 9), "TIFF"), "none of PNG"),
    "bmp": ("image", encoded(picture(9, 9), "BMP"), "none of PNG"),
    "playlist": ("video", b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n", "none of PNG"),
    "concat": ("video", b"ffconcat version 1.0\nfile '/etc/passwd'\n", "none of PNG"),
    "text as video": ("video", b"\0\0\0\x18ftypisom" + b"x" * 400, "cannot be decoded|no video"),
    "cut video": ("video", clip([picture(64, 64)] * 9)[:600], "cannot be decoded|without frames|no video"),
    "many frames": ("video", animated([Image.new("L", (2, 2), i % 256) for i in range(301)], "GIF", 10), "301 frames"),
    "no pdf": ("pages", b"%!PS-Adobe", "the file is no PDF"),
    "broken pdf": ("pages", b"%PDF-1.7\n%%EOF", "cannot be decoded"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_the_next_job_runs(
    processes: MediaProcesses, name: str
) -> None:
    """P10, T10."""
    kind, data, message = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=message):
        run(processes, kind, data)
    assert len(run(processes, "image", encoded(picture(8, 8)))) == 1


def test_memory_is_bounded(processes: MediaProcesses) -> None:
    """The picture alone exceeds what the process may take; the next job finds another process."""
    small = MediaProcesses(DecodingLimits(pixels=10**10, memory_bytes=1 << 30, time_s=60.0), size=1)
    try:
        with pytest.raises(
            InvalidRequest, match=r"too much memory|cannot be decoded|ended|far more"
        ):
            run(small, "image", png(13_000, 13_000))
        assert len(run(small, "image", encoded(picture(8, 8)))) == 1
    finally:
        small.close()


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_costs_itself_alone() -> None:
    hasty = MediaProcesses(DecodingLimits(time_s=0.02), size=1)
    try:
        with pytest.raises(InvalidRequest, match=r"longer than 0.02 s"):
            run(hasty, "image", encoded(picture(3000, 3000)))
    finally:
        hasty.close()


def test_a_process_killed_from_outside_is_not_the_file_s_fault(processes: MediaProcesses) -> None:
    run(processes, "image", encoded(picture(8, 8)))
    with processes._pool.borrowed(wait_s=0) as process:
        pass
    os.kill(process._child._process.pid, signal.SIGSTOP)
    errors: list[HeadraceError] = []

    def ask() -> None:
        try:
            run(processes, "image", encoded(picture(8, 8)))
        except HeadraceError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    os.kill(process._child._process.pid, signal.SIGKILL)
    thread.join()
    assert not errors or isinstance(errors[0], Unavailable)
    assert len(run(processes, "image", encoded(picture(8, 8)))) == 1
