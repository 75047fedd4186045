"""The process that decodes and processes media: `python -m headrace.front.media.worker MEMORY
SECONDS`.

What clients send is decoded where it can be killed: in a process with bounded memory, under an
alarm that ends the process even if nobody waits for it any more. A job is a msgpack head and the
files behind it, an answer a head and the patches behind it; both heads stand behind their lengths.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.front.media import decoders
from headrace.front.media.job import LENGTHS, InputShape, JobReply, MediaJob, MediumReply
from headrace.front.media.processing import ProcessedMedia
from headrace.front.media.processors.families import PROCESSORS
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.front.media.processors.video_sound import with_sound
from headrace.front.media.sound import has_sound, samples_of, sound


def answer(job: MediaJob, payload: memoryview) -> tuple[JobReply, list[ProcessedMedia]]:
    """Decodes and processes."""
    try:
        media = _processed(job, _files(job, payload))
    except HeadraceError as error:
        return JobReply(error=error.message), []
    except MemoryError:
        return JobReply(error="decoding needs too much memory"), []
    replies = tuple(
        MediumReply(
            inputs=tuple(
                InputShape(
                    kind=each.kind,
                    grid=each.grid,
                    row_bytes=each.rows.shape[1],
                    step_s=each.step_s,
                    num_tokens=each.num_tokens,
                    cut=each.cut,
                )
                for each in medium.inputs
            ),
            layout=medium.layout,
            row_break=medium.row_break,
            row=medium.row,
        )
        for medium in media
    )
    return JobReply(media=replies), media


def _files(job: MediaJob, payload: memoryview) -> list[bytes]:
    files, begin = [], 0
    for size in job.sizes:
        files.append(bytes(payload[begin : begin + size]))
        begin += size
    return files


def _processed(job: MediaJob, files: list[bytes]) -> list[ProcessedMedia]:
    if job.kind == "audio":
        samples = sound(files[0], job.limits)
        if not job.family:
            return [samples]
        return [spectrogram(samples_of(samples), job.settings)]
    processor = PROCESSORS.load(job.family)(job.settings)
    if job.kind == "image":
        return [decoders.image(files[0], processor, job.limits)]
    if job.kind == "video":
        medium = decoders.video(files[0], processor, job.limits)
        if job.settings.sound_of_video and has_sound(files[0]):
            heard = spectrogram(samples_of(sound(files[0], job.limits)), job.settings)
            medium = with_sound(medium, heard, job.settings)
        return [medium]
    if job.kind == "frames":
        return [decoders.frames(files, processor, job.rate, job.limits)]
    if job.kind == "pages":
        return decoders.pages(files[0], processor, job.limits)
    raise InvalidRequest(f"{job.kind!r} is no kind of medium")


def serve(source: BinaryIO, sink: BinaryIO, *, limit_s: float) -> None:
    """Answers jobs until the other end closes; one that takes longer than `limit_s` ends the
    process."""
    sink.write(b"!")
    sink.flush()
    while len(lengths := source.read(LENGTHS.size)) == LENGTHS.size:
        head_bytes, payload_bytes = LENGTHS.unpack(lengths)
        job = msgspec.msgpack.decode(source.read(head_bytes), type=MediaJob)
        payload = source.read(payload_bytes)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        reply, media = answer(job, memoryview(payload))
        signal.setitimer(signal.ITIMER_REAL, 0)
        head = msgspec.msgpack.encode(reply)
        rows = [each.rows for medium in media for each in medium.inputs]
        sink.write(LENGTHS.pack(len(head), sum(one.nbytes for one in rows)) + head)
        for one in rows:
            sink.write(one.data)
        sink.flush()


if __name__ == "__main__":
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    serve(sys.stdin.buffer, sys.stdout.buffer, limit_s=float(sys.argv[2]))
