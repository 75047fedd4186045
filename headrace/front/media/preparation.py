"""A conversation's media on their way into its prompt: read, decoded, processed, expanded.

What a medium becomes is a function of its bytes and of the processor's settings, and so is its key:
the same image in another conversation is found in the cache here, in the encoder's cache and in the
prefix cache. Limits come before the work: numbers of media before anything is read, bytes while
they arrive, pixels and seconds before and while decoding, tokens as soon as they are known.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.base.errors import InvalidRequest, RequestError
from headrace.base.wire.media import MediaInput
from headrace.front.media.embeds import embedded
from headrace.front.media.fetch import AllowedHosts, Fetcher, FetchLimits, read_local
from headrace.front.media.job import DecodingLimits, MediaJob
from headrace.front.media.jobs import MediaProcesses, default_size
from headrace.front.media.offline import content_bytes
from headrace.front.media.parts import (
    ContentFile,
    MediaPart,
    each_part,
    from_bare_base64,
    from_data_url,
    with_images,
)
from headrace.front.media.placeholders import MediaBudget, PreparedMedium, expanded
from headrace.front.media.processing import ProcessedMedia
from headrace.front.text.media_parts import MediaMark
from headrace.front.text.tokenizer import Tokenizer

ReadFile = Callable[[str, str], Awaitable[bytes]]
"""The bytes of a stored file, by its id and the field that names it."""
CACHE_BYTES = 256 << 20
LOW_PIXELS = 512 * 512
DEFAULT_MOST = {"image": 32, "video": 4, "audio": 16}
_SOUND = "use_audio_in_video"
_ARGUMENTS = ("min_pixels", "max_pixels", "fps", "max_frames", _SOUND)


@dataclass(frozen=True, kw_only=True)
class MediaRequest:
    """What beside the messages bears on their media. `arguments`: `mm_processor_kwargs`;
    `read_file`: of the files API; `tenant`: whose uuids these are; `max_tokens`: all media may
    have."""

    arguments: Mapping[str, Any] | None = None
    read_file: ReadFile | None = None
    tenant: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """Messages with marks in place of media, and the media in the order of the marks."""

    messages: list[dict[str, Any]]
    media: list[PreparedMedium]


class MediaPreparer:
    """Prepares media for one model. For one event loop."""

    def __init__(
        self,
        spec: MediaSpec,
        tokenizer: Tokenizer,
        *,
        limits: DecodingLimits | None = None,
        fetch_limits: FetchLimits | None = None,
    ) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._fetch_limits = fetch_limits or FetchLimits()
        self._fetcher = Fetcher(AllowedHosts(spec.domains), self._fetch_limits)
        self._processes = MediaProcesses(limits or DecodingLimits(), size=default_size())
        self._cache = _Cache(CACHE_BYTES)
        self._uuids: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()

    async def prepare(
        self, messages: Sequence[dict[str, Any]], request: MediaRequest
    ) -> PreparedChat:
        """Reads and processes every medium of the messages."""
        spec, messages = self.spec, with_images(messages)
        places = each_part(messages)
        media = await self.media_of([part for _, _, part in places], request)
        marked = [dict(message) for message in messages]
        for (i, j, _), parts in reversed(list(zip(places, media, strict=True))):
            content = list(marked[i]["content"])
            content[j : j + 1] = [
                MediaMark(part.kind, spec.written.get(part.kind, ""))
                for part in parts
                if spec.ahead is None
            ]
            marked[i]["content"] = content
        return PreparedChat(messages=marked, media=[part for parts in media for part in parts])

    async def media_of(
        self, parts: Sequence[MediaPart], request: MediaRequest
    ) -> list[list[PreparedMedium]]:
        """What each part becomes: one medium, or the pages of a document."""
        self._check_numbers(parts)
        settings = adjusted(self.spec.settings, request.arguments)
        images = [part for part in parts if _kind_of(part) == "image"]
        many = len(images) > settings.most_cut or any(one.kind == "pages" for one in images)
        if settings.most_cut and many:
            settings = msgspec.structs.replace(settings, tiles=(1, 1))
        if images and settings.sound is not None and settings.sound.seeing is not None:
            sound = msgspec.structs.replace(settings.sound, seeing=True)
            settings = msgspec.structs.replace(settings, sound=sound)
        budget = MediaBudget(request.max_tokens)
        tasks = [
            asyncio.ensure_future(self._one(part, settings, request, budget)) for part in parts
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def expand(
        self, ids: list[int], media: Sequence[PreparedMedium], *, field: str
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """See `expanded`."""
        return expanded(ids, media, self.spec, self._encode, field=field)

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check_numbers(self, parts: Sequence[MediaPart]) -> None:
        tokens = self.spec.tokens
        most = DEFAULT_MOST | self.spec.most
        count = dict.fromkeys(tokens, 0)
        for part in parts:
            kind = _kind_of(part)
            count[kind] += 1
            if tokens[kind] is None:
                raise _bad(part.field, f"this model takes no {kind}")
            if count[kind] > most[kind]:
                total = sum(_kind_of(each) == kind for each in parts)
                raise _bad(
                    part.field,
                    f"{total} of kind {kind} given; at most {most[kind]} are allowed "
                    "(--limit-mm-per-prompt)",
                )
            if count["image"] and count["video"] and tokens["image"] == tokens["video"]:
                raise _bad(part.field, "images and video do not go together in a prompt here")

    async def _one(
        self,
        part: MediaPart,
        settings: ProcessorSettings,
        request: MediaRequest,
        budget: MediaBudget,
    ) -> list[PreparedMedium]:
        if part.embeds:
            if not self.spec.embeds:
                raise _bad(part.field, "is not accepted: --enable-mm-embeds is off")
            medium = await asyncio.to_thread(embedded, part, settings.merge)
            budget.take([medium], part.field)
            return [medium]
        if part.low:
            settings = _at_most(settings, LOW_PIXELS)
        name = (request.tenant, part.kind, part.uuid or "")
        if part.uuid and not (part.address or part.file_id) and part.content is None:
            digest = self._known(name, part)
            source = None
        else:
            source = await self._read(part, request)
            digest = await asyncio.to_thread(_digest, part.kind, source)
            self._remember(name, digest)
        key = _key(digest, self.spec.processor, settings)
        media = self._cache.get(key)
        if media is None:
            if source is None:
                raise _bad(part.field, "the content of this uuid is not kept any more; send it")
            media = await self._processed(part, source, settings, key)
            self._cache.put(key, media)
        budget.take(media, part.field)
        return media

    async def _read(self, part: MediaPart, request: MediaRequest) -> ContentFile:
        field, most = part.field, self._fetch_limits.max_bytes
        if part.content is not None:
            frames = part.kind == "video" and not isinstance(part.content, bytes)
            files = await asyncio.to_thread(content_bytes, part.content, field)
            return ContentFile(files, frames)
        if part.file_id:
            if request.read_file is None:
                raise _bad(field, "this server keeps no files")
            return ContentFile((await request.read_file(part.file_id, field),))
        address = part.address
        if address[:5].lower() == "data:":
            return await asyncio.to_thread(from_data_url, address, field)
        if address.startswith("file:"):
            path = (address, self.spec.local_root, most, field)
            return ContentFile((await asyncio.to_thread(read_local, *path),))
        if "://" not in address[:16]:
            bare = await asyncio.to_thread(from_bare_base64, address)
            if bare is not None:
                return ContentFile((bare,))
        return ContentFile((await self._fetcher.get(address, field),))

    async def _processed(
        self, part: MediaPart, source: ContentFile, settings: ProcessorSettings, key: bytes
    ) -> list[PreparedMedium]:
        kind = "frames" if source.frames else part.kind
        if kind == "frames" and part.kind != "video":
            raise _bad(part.field, "a list of frames is a video, not an image")
        if kind == "pages" and not source.files[0][:1024].lstrip().startswith(b"%PDF-"):
            kind = "image"  # a file by its id, which may be either
        job = MediaJob(
            kind=kind,
            family=self.spec.processor,
            settings=settings,
            limits=self._processes.limits,
            sizes=tuple(map(len, source.files)),
        )
        try:
            media = await asyncio.to_thread(self._processes.run, job, source.files)
        except RequestError as error:
            raise type(error)(f"{part.field}: {error.message}", field=part.field) from None
        mark = _kind_of(part)
        prepared: list[PreparedMedium] = []
        for medium in media:
            start = sum(len(each.inputs) for each in prepared)
            prepared.append(_prepared(medium, mark, key, start, settings.merge))
        return prepared

    def _known(self, name: tuple[str, str, str], part: MediaPart) -> bytes:
        digest = self._uuids.get(name)
        if digest is None:
            raise _bad(part.field, "the content of this uuid was not sent yet; send it once")
        self._uuids.move_to_end(name)
        return digest

    def _remember(self, name: tuple[str, str, str], digest: bytes) -> None:
        if name[2]:
            self._uuids[name] = digest
            self._uuids.move_to_end(name)
            if len(self._uuids) > 65_536:
                self._uuids.popitem(last=False)


def _kind_of(part: MediaPart) -> str:
    """Whose placeholder stands for a part: pages are images."""
    return part.kind if part.kind in ("video", "audio") else "image"


class _Cache:
    """Processed media by key, the least recently used one out first."""

    def __init__(self, max_bytes: int) -> None:
        self._most, self._bytes = max_bytes, 0
        self._media: OrderedDict[bytes, list[PreparedMedium]] = OrderedDict()

    def get(self, key: bytes) -> list[PreparedMedium] | None:
        media = self._media.get(key)
        if media is not None:
            self._media.move_to_end(key)
        return media

    def put(self, key: bytes, media: list[PreparedMedium]) -> None:
        size = _size(media)
        if key in self._media or size > self._most:
            return
        self._media[key] = media
        self._bytes += size
        while self._bytes > self._most:
            self._bytes -= _size(self._media.popitem(last=False)[1])


def _size(media: list[PreparedMedium]) -> int:
    return sum(each.num_bytes for each in media)


def adjusted(settings: ProcessorSettings, arguments: Mapping[str, Any] | None) -> ProcessorSettings:
    """The settings with what a request asks for, within the bounds of the model's own."""
    if not arguments:
        return settings
    for name in arguments:
        if name not in _ARGUMENTS:
            raise _bad(
                f"mm_processor_kwargs.{name:.80}",
                f"not accepted; allowed: {', '.join(_ARGUMENTS)}",
            )
    low, high = settings.image_pixels
    least = _whole(arguments, "min_pixels", low, low, high)
    most = _whole(arguments, "max_pixels", high, low, high)
    if least > most:
        raise _bad("mm_processor_kwargs.min_pixels", f"{least} given; max_pixels is {most}")
    video_low, video_high = settings.video_pixels
    fps = arguments.get("fps", settings.fps)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.01 <= fps <= 60:
        raise _bad("mm_processor_kwargs.fps", f"{fps!r:.80} given; allowed: 0.01 to 60")
    frames = _whole(arguments, "max_frames", settings.max_frames, 1, settings.max_frames)
    sounds = arguments.get(_SOUND, False)
    if not isinstance(sounds, bool):
        raise _bad(
            f"mm_processor_kwargs.{_SOUND}", f"{sounds!r:.80} given; true or false is wanted"
        )
    if sounds and (settings.sound is None or settings.sound.in_video is None):
        raise _bad(f"mm_processor_kwargs.{_SOUND}", "true given; this model hears no video")
    return msgspec.structs.replace(
        settings,
        image_pixels=(least, most),
        video_pixels=(video_low, min(video_high, max(most, video_low))),
        fps=float(fps),
        sound_of_video=sounds,
        min_frames=min(settings.min_frames, frames),
        max_frames=frames,
    )


def _whole(arguments: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _bad(
            f"mm_processor_kwargs.{name}", f"{value!r:.80} given; allowed: {least} to {most}"
        )
    return value


def _at_most(settings: ProcessorSettings, pixels: int) -> ProcessorSettings:
    low, high = settings.image_pixels
    return msgspec.structs.replace(settings, image_pixels=(min(low, pixels), min(high, pixels)))


def _digest(kind: str, source: ContentFile) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for file in source.files:
        digest.update(len(file).to_bytes(8, "little"))
        digest.update(file)
    return digest.digest()


def _key(digest: bytes, processor: str, settings: ProcessorSettings) -> bytes:
    how = msgspec.msgpack.encode((processor, settings))
    return hashlib.sha256(digest + how).digest()


def _prepared(
    medium: ProcessedMedia, kind: str, key: bytes, start: int, merge: int
) -> PreparedMedium:
    """With keys and token counts; `start`: inputs of the same file before it."""
    inputs = []
    for number, each in enumerate(medium.inputs, start):
        t, h, w = each.grid
        own = hashlib.sha256(key + number.to_bytes(4, "little")).digest()
        inputs.append(
            MediaInput(
                kind=each.kind,
                key=own,
                offset=0,
                num_tokens=each.num_tokens
                or t * h * w // merge**2 + (t * h // merge - 1) * bool(medium.row_break),
                grid=each.grid,
                step_s=each.step_s,
                cut=each.cut,
                rows=each.rows.tobytes(),
            )
        )
    return PreparedMedium(
        kind=kind,
        inputs=tuple(inputs),
        layout=medium.layout,
        row_break=medium.row_break,
        row=medium.row,
        merge=merge,
    )


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
