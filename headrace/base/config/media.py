"""How media become part of a prompt: what launch reads from a checkpoint and the front works by."""

from __future__ import annotations

import msgspec

ImageNorm = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and deviation of red, green and blue, of values between 0 and 1."""


class MagnitudeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms of magnitudes in mel bands between `low_hz` and `high_hz`. `frame`: samples that
    one sees, `transform`: of the transform, `lead`: of silence before the sound. `emphasis`: the
    share of the sample before, which is taken from each. `least`: of a magnitude, or with
    `adds_least` what is added to each. `multiple`: of samples, to which a sound is filled up."""

    frame: int
    transform: int
    low_hz: float
    high_hz: float
    emphasis: float = 0.0
    least: float = 1e-3
    adds_least: bool = False
    multiple: int = 1
    lead: int = 0


class NormalizedMel(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms of energies in mel bands, each band of mean 0 and deviation 1. `frame`: samples
    that one sees, `transform`: of the transform. `emphasis`: the share of the sample before, which
    is taken from each. `silent_frames`: of zeros behind the sound, which have tokens too. `plain`:
    mean and deviation stay as they are."""

    frame: int = 400
    transform: int = 512
    emphasis: float = 0.97
    silent_frames: int = 0
    plain: bool = False


class PowerMel(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms of energies in mel bands between `low_hz` and `high_hz`, each `least` at least.
    `frame`: samples that one sees, `transform`: of the transform; `scale`: of samples between -1
    and 1. `centered`: a frame's mean is taken from it. `emphasis`: the share of the sample before,
    which is taken from each. `shape`: of the window (hann, hamming, povey: Povey et al. 2011).
    `normal`: each band has mean 0 and deviation 1 over the sound, by the deviation of a "sample" or
    of the "whole"; "": it has its own."""

    frame: int = 400
    transform: int = 512
    low_hz: float = 125.0
    high_hz: float = 7500.0
    least: float = 1e-5
    scale: float = 1.0
    centered: bool = False
    emphasis: float = 0.0
    shape: str = "hann"
    normal: str = ""


class Waveform(msgspec.Struct, frozen=True, kw_only=True):
    """Samples themselves; `normal`: with mean 0 and deviation 1 over the sound."""

    normal: bool = True


class SpeechInTime(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model that says a token for each piece of a sound, while it comes: `piece`: its frames.
    Before the sound come `lead` pieces of silence, behind it `tail`, after it is filled up to whole
    pieces. The prompt is `first`, then `pad` for each piece of the lead and for `delay` more: so
    far is the text behind the sound."""

    piece: int
    lead: int
    tail: int
    delay: int
    first: int
    pad: int


class VideoSound(msgspec.Struct, frozen=True, kw_only=True):
    """How a video's tokens and those of its sound take turns. `per_s`: tokens of sound a second;
    `chunk_s`: of each so many seconds take turns, 0: each step of the video stands before the sound
    from its time on. `around`: text before and behind all."""

    per_s: float
    chunk_s: float = 0.0
    around: tuple[str, str] = ("", "")


class SoundClock(msgspec.Struct, frozen=True, kw_only=True):
    """Text between a sound's tokens: behind each `every_s` seconds their number, where `per_s`
    tokens stand for a second."""

    per_s: float
    every_s: int


class SoundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its sound. `bands` of mel; `window`: frames to whose multiples a
    sound is filled up with silence, `least`: to so many at least, `most`: it may have, 0: any;
    `part`: so many are an input of their own. `breaks`: tokens of the text between its rows, which
    is what stands behind one and before the next.
    `magnitudes`, `normalized`, `waveform`, `power`: how its frames are made, where that is not
    Whisper's way; `stack`: so many of `power`'s frames, or of other frames still, stand side by
    side in a row. `changes`: behind each frame stands its change, by the frames beside it.
    `around`: text before and behind its tokens. `loudest`: decades of power below
    which RANGE lies, whatever the sound has; None: the sound's own. `in_time`: see SpeechInTime.
    `seeing`: whether images stand in its prompt, which each frame tells by one more value, 0 or 1;
    None: it tells nothing. `in_video`: how it stands in a video; None: it cannot. `windowed`:
    "heard" or "paired", windows of half a minute (front/media/paired_mel.py). `clock`: seconds
    stand between its tokens; None: they do not. The rest as in
    `base/wire/media.py: SoundSteps`."""

    bands: int
    window: int = 0
    part: int = 0
    breaks: int = 0
    least: int = 0
    most: int = 0
    strides: tuple[tuple[int, int, int], ...] = ()
    pool: int = 1
    chunk: int = 0
    per_chunk: int = 0
    margin: int = 0
    row: int = 0
    magnitudes: MagnitudeSettings | None = None
    normalized: NormalizedMel | None = None
    waveform: Waveform | None = None
    power: PowerMel | None = None
    stack: int = 0
    changes: bool = False
    around: tuple[str, str] = ("", "")
    loudest: float | None = None
    in_time: SpeechInTime | None = None
    seeing: bool | None = None
    in_video: VideoSound | None = None
    windowed: str = ""
    clock: SoundClock | None = None


class ProcessorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its processor. `image_pixels` and `video_pixels`: the least and the
    most of a resized image, and of a video: of one frame, or with `pixels_of_all_frames` of all.
    `stamped`: frame pairs are inputs of their own, with their times as text between them.
    `max_duration_s`: from where on a longer video has no more frames.

    Of models with inputs of one size: `side` of the square in pixels, `fit` of an image to it
    (crop, pad, stretch; inside: made to fit, then padded, `shortest` pixels of a side at least),
    `tiles`: the least and the most squares of an image. `longest`: the longest side of a resized
    image. `resample`: Pillow's number of a filter (1 Lanczos, 2 bilinear, 3 bicubic).
    `pad_color`: what fills a padded square. `around`: text before and behind an image.

    `pruned`: the share of a video's tokens that are left out, those whose pixels are nearest to the
    step before.

    `sizes`: heights and widths in pixels that a picture is fitted into, cut into squares.
    `most_windows`: of what is shown of them, 0: any. `most_cut`: images of a prompt, beyond whose
    number none is cut, 0: any. `rows_each`: tokens that an input becomes
    whatever its size, 0: they follow from it; `extra`: more than those of its windows.
    `dense`: the most tiles of pictures which fewer would make smaller than this share of their
    width, and whose ratio is above the third and at most the fourth number; 0: any.
    `turned`: pictures are turned so that their longer side is that of the one of `sizes`;
    `trimmed`: margins of pages are cut off. `marks`: further texts of the family around and between
    its tiles.

    Of models that hear: `sound`; `sound_of_video`: a video's is heard too."""

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    image_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    video_pixels: tuple[int, int] = (128 * 28 * 28, 28 * 28 * 768)
    pixels_of_all_frames: bool = False
    stamped: bool = False
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_duration_s: int = 300
    pruned: float = 0.0
    side: int = 0
    fit: str = "stretch"
    shortest: int = 1
    tiles: tuple[int, int] = (1, 1)
    longest: int = 0
    resample: int = 3
    pad_color: tuple[int, int, int] = (0, 0, 0)
    around: tuple[str, str] = ("", "")
    sizes: tuple[tuple[int, int], ...] = ()
    most_windows: int = 0
    most_cut: int = 0
    rows_each: int = 0
    extra: int = 0
    dense: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    turned: bool = False
    trimmed: bool = False
    marks: tuple[str, ...] = ()
    sound: SoundSettings | None = None
    sound_of_video: bool = False


class MediaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to take images, video and audio. `processor` names a row of
    front/media/processing.py; `image_token`, `video_token` and `audio_token` are the placeholders'
    ids (None: the model takes none of that kind; images and video that have the same do not go
    together). `image_mark`: of what stands for an image in a
    prompt that is not expanded, where that is another token. `video_soft`: what stands for a
    video's tokens in one that is, where that is the images' token. `joins_newlines`: the tokenizer
    has tokens of several newlines, which those around an image become one of with their neighbours.
    `shares_ends`: images that meet in a prompt share the text between them. `ahead`: images of
    messages stand before all text, behind these ids, which then begin the prompt.
    `alone`: an encoder before the decoder reads an image and nothing else; the text of a prompt is
    what the decoder begins with. `template`: of chats, where the checkpoint has none.
    `written`: by kind what stands for one in a message's text, where templates take texts alone.
    `norm`: what the checkpoint's files say of the values of colours; None: nothing.
    `numbered`: texts around the number of an image in its prompt, which stands before it.
    `most`: of each kind in one prompt. `domains`: where media may be fetched from; `local_root`:
    the folder whose files may be named, or None. `transcribes`: what it says of a sound alone is
    what is said there, `asks`: what is asked before it (empty: nothing, and it tells the language),
    `speakers`: whether an answer says who speaks, and when.
    `embeds`: vectors may stand in place of media. `blank`: the label that says of a frame that
    nothing is heard anew, of models that know labels of frames alone; None: it is no such model.
    `emits`: such a model says which tokens a frame emits (base/config/ctc.py)."""

    processor: str
    settings: ProcessorSettings
    image_token: int | None
    video_token: int | None
    image_mark: int | None = None
    video_soft: int | None = None
    joins_newlines: bool = False
    shares_ends: bool = False
    ahead: tuple[int, ...] | None = None
    alone: bool = False
    template: str | None = None
    written: dict[str, str] = {}
    numbered: tuple[str, str] | None = None
    norm: ImageNorm | None = None
    audio_token: int | None = None
    transcribes: bool = False
    asks: str = ""
    speakers: bool = False
    blank: int | None = None
    emits: bool = False
    most: dict[str, int] = {}
    domains: tuple[str, ...] = ()
    local_root: str | None = None
    embeds: bool = False

    @property
    def tokens(self) -> dict[str, int | None]:
        """The placeholder of each kind."""
        return {
            "image": self.image_token,
            "video": self.video_token,
            "audio": self.audio_token,
        }
