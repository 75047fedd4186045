"""What `headrace plan` says of media: the tokens that the processors of the families give, without a run."""

from __future__ import annotations

from headrace.base.config.media import MediaSpec, ProcessorSettings, SoundSettings
from headrace.launch.media_counts import media_counts


def test_images_video_and_sound_of_a_model_that_takes_all() -> None:
    sound = SoundSettings(bands=8, strides=((3, 2, 1),) * 3, chunk=100, most=2000)
    settings = ProcessorSettings(patch=14, merge=2, sound=sound)
    spec = MediaSpec(
        processor="qwen_vl", settings=settings, image_token=1, video_token=2, audio_token=3
    )
    assert dict(media_counts(spec)) == {
        # sides to the next multiple of 28, at most 1,280 tokens
        "image 256 x 256": 9 * 9,
        "image 1024 x 1024": 35 * 35,
        "image 1920 x 1080": 47 * 26,
        # 20 frames in pairs
        "video 640 x 360, 10 s": 10 * 23 * 13,
        # 13 tokens a second; 20 s are the longest it hears
        "sound 1 s": 13,
        "sound 10 s": 130,
    }


def test_a_model_that_hears_alone_says_nothing_of_images() -> None:
    sound = SoundSettings(bands=8, window=3000, strides=((3, 1, 1),), chunk=3000, per_chunk=375)
    spec = MediaSpec(
        processor="sound",
        settings=ProcessorSettings(sound=sound),
        image_token=None,
        video_token=None,
        audio_token=3,
    )
    assert dict(media_counts(spec)) == {"sound 1 s": 375, "sound 10 s": 375, "sound 30 s": 375}
