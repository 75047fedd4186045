"""Bytes of clients to pictures: Pillow for images, PyAV for video, PDFium for pages.

Runs in the processes of `worker.py` alone. What a file declares is checked before it is decoded;
formats and codecs are allow-lists, recognised by the file's own first bytes, so that no decoder
that would open other files or addresses is ever chosen.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from PIL import Image, ImageSequence, UnidentifiedImageError

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.base.optional import require
from headrace.front.media.job import DecodingLimits
from headrace.front.media.picture import upright
from headrace.front.media.processing import ProcessedMedia, Processor, Sampling
from headrace.front.media.sound import open_container

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_CODECS = frozenset(
    ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "mjpeg", "theora", "gif")
)
_PAGE_DPI = 144
_POINTS = 72


def image(data: bytes, processor: Processor, limits: DecodingLimits) -> ProcessedMedia:
    """An image, of an animation the first frame."""
    with _readable():
        picture = upright(opened(data, limits))
        picture.load()
    return processor.image(picture)


def frames(
    files: list[bytes], processor: Processor, rate: float, limits: DecodingLimits
) -> ProcessedMedia:
    """A video whose frames were sampled before: each is a file, and all are taken."""
    with _readable():
        pictures = [upright(opened(data, limits)) for data in files]
        for picture in pictures:
            if picture.size != pictures[0].size:
                raise InvalidRequest(
                    f"frames of {_shown(pictures[0])} and of {_shown(picture)} pixels given; "
                    "all must have one size"
                )
    indices = list(range(len(pictures)))
    return processor.video(pictures, indices, Sampling(len(pictures), rate))


def video(data: bytes, processor: Processor, limits: DecodingLimits) -> ProcessedMedia:
    """A video file, or an animation."""
    if _container(data) is None:
        with _readable():
            return _animation(data, processor, limits)
    av = require("av", extra="media", purpose="video")
    with _readable(), open_container(av, data, _container(data)) as container:
        stream = _video_stream(container, limits)
        total = _num_frames(container, stream, limits)
        source = Sampling(total, float(_rate(stream)))
        if source.num_frames / source.rate > limits.seconds:
            raise InvalidRequest(
                f"a video of {source.num_frames / source.rate:.0f} s given; at most "
                f"{limits.seconds:g} s are allowed"
            )
        indices = processor.frames_of(source)
        container.seek(0)
        pictures = _sampled(_decoded(container, stream, limits), indices)
        return processor.video(pictures, indices, source)


def pages(data: bytes, processor: Processor, limits: DecodingLimits) -> list[ProcessedMedia]:
    """The pages of a PDF, each as an image."""
    if not data[:1024].lstrip().startswith(b"%PDF-"):
        raise InvalidRequest("the file is no PDF")
    pdfium = require("pypdfium2", extra="media", purpose="a PDF")
    with _readable():
        document = pdfium.PdfDocument(data)
        if len(document) > limits.pages:
            raise InvalidRequest(
                f"a document of {len(document)} pages given; at most {limits.pages} are allowed"
            )
        return [processor.image(_page(document, i, limits)) for i in range(len(document))]


def opened(data: bytes, limits: DecodingLimits) -> Image.Image:
    """An image's header, its size checked; nothing is decoded yet."""
    try:
        picture = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except Image.DecompressionBombError:
        raise InvalidRequest(
            f"an image of far more than {limits.pixels} pixels given; so many are allowed"
        ) from None
    if not picture.width or not picture.height:
        raise InvalidRequest("an image without pixels given")
    if picture.width * picture.height > limits.pixels:
        raise InvalidRequest(
            f"an image of {_shown(picture)} pixels given; at most {limits.pixels} pixels are "
            "allowed"
        )
    return picture


@contextmanager
def _readable() -> Iterator[None]:
    """What a decoder raises is the file's fault."""
    try:
        yield
    except (HeadraceError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise InvalidRequest(f"the file is none of {', '.join(IMAGE_FORMATS)}") from None
    except Exception as error:
        raise InvalidRequest(f"the file cannot be decoded ({type(error).__name__})") from None


def _shown(picture: Image.Image) -> str:
    return f"{picture.width} x {picture.height}"


def _container(data: bytes) -> str | None:
    """The demuxer for a file's first bytes; None: it is none of these."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:4] == b"OggS":
        return "ogg"
    if data[:1] == b"\x47" and data[188:189] == b"\x47":
        return "mpegts"
    return None


def _video_stream(container: Any, limits: DecodingLimits) -> Any:
    if not container.streams.video:
        raise InvalidRequest("the file has no video stream")
    stream = container.streams.video[0]
    codec = stream.codec_context.name
    if codec not in _CODECS and codec not in ("libdav1d", "libvpx-vp9", "libvpx"):
        raise InvalidRequest(
            f"a video of codec {codec!r:.40} given; allowed: {', '.join(sorted(_CODECS))}"
        )
    width, height = stream.codec_context.width, stream.codec_context.height
    if not width or not height or width * height > limits.pixels:
        raise InvalidRequest(
            f"a video of {width} x {height} pixels given; at most {limits.pixels} pixels a frame "
            "are allowed"
        )
    stream.thread_type = "NONE"
    return stream


def _num_frames(container: Any, stream: Any, limits: DecodingLimits) -> int:
    """Counted, for what a header says need not be so."""
    count = 0
    for packet in container.demux(stream):
        count += bool(packet.size)
        if count > limits.frames:
            raise InvalidRequest(
                f"a video of more than {limits.frames} frames given; so many are allowed"
            )
    if not count:
        raise InvalidRequest("a video without frames given")
    return count


def _rate(stream: Any) -> Fraction:
    rate = stream.average_rate or stream.guessed_rate or Fraction(24)
    return rate if rate > 0 else Fraction(24)


def _decoded(container: Any, stream: Any, limits: DecodingLimits) -> Iterator[Any]:
    for frame in container.decode(stream):
        if frame.width * frame.height > limits.pixels:
            raise InvalidRequest(
                f"a frame of {frame.width} x {frame.height} pixels given; at most "
                f"{limits.pixels} pixels are allowed"
            )
        yield frame


def _sampled(decoded: Iterator[Any], indices: list[int]) -> Iterator[Image.Image]:
    """The frames at these indices; where frames cannot be decoded, the last one stands in."""
    wanted, last, size = iter(indices), None, None
    index = next(wanted, None)
    for number, frame in enumerate(decoded):
        if index is None:
            return
        if number < index:
            continue
        last = _picture_of(frame, size)
        size = size or last.size
        while index == number:
            yield last
            index = next(wanted, None)
    if last is None:
        raise InvalidRequest("no frame of the video can be decoded")
    while index is not None:
        yield last
        index = next(wanted, None)


def _picture_of(frame: Any, size: tuple[int, int] | None) -> Image.Image:
    """A frame, turned as its file says, in the size of the first one."""
    picture: Image.Image = frame.to_image()
    if turns := round((getattr(frame, "rotation", 0) or 0) / 90) % 4:
        picture = picture.rotate(90 * turns, expand=True)
    return picture if size in (None, picture.size) else picture.resize(size)


def _animation(data: bytes, processor: Processor, limits: DecodingLimits) -> ProcessedMedia:
    """A GIF, WebP or APNG; an image of one frame is a video of one frame."""
    picture = opened(data, limits)
    total = getattr(picture, "n_frames", 1)
    if total > limits.frames or total * picture.width * picture.height > 40 * limits.pixels:
        raise InvalidRequest(
            f"an animation of {total} frames of {_shown(picture)} pixels given; at most "
            f"{limits.frames} frames and {40 * limits.pixels} pixels in all are allowed"
        )
    total_ms = 0
    for frame in ImageSequence.Iterator(picture):
        frame.load()  # a WebP tells a frame's duration only then
        total_ms += frame.info.get("duration", 0) or 100
    source = Sampling(total, 1000 * total / total_ms)
    indices = processor.frames_of(source)
    return processor.video(_frames_at(picture, indices), indices, source)


def _frames_at(picture: Image.Image, indices: list[int]) -> Iterator[Image.Image]:
    for index in indices:
        picture.seek(index)
        yield upright(picture.copy())


def _page(document: Any, index: int, limits: DecodingLimits) -> Image.Image:
    page = document[index]
    width, height = (side * _PAGE_DPI / _POINTS for side in page.get_size())
    if not 0 < width * height <= limits.pixels:
        raise InvalidRequest(
            f"page {index + 1} has {width:.0f} x {height:.0f} pixels at {_PAGE_DPI} dpi; at most "
            f"{limits.pixels} are allowed"
        )
    picture: Image.Image = page.render(scale=_PAGE_DPI / _POINTS).to_pil()
    return picture.convert("RGB")
