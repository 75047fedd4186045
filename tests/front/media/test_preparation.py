"""Messages with media to prompts with placeholders: limits, caches, uuids, settings of requests (MUL-05)."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.media import MediaSpec
from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.media import MediaSpan
from headrace.front.media.preparation import MediaPreparer, MediaRequest
from headrace.front.media.processors.families import read_media
from headrace.front.media.prompt_vectors import VectorsPreparer
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.media_parts import NO_TOKEN, has_media
from headrace.front.text.tokenizer import VECTORS
from headrace.front.text.tokenizer_files import load_tokenizer
from tests.front.media.folders import TEMPLATE, write_processors, write_tokenizer
from tests.front.media.pictures import clip, encoded, picture

CONFIG = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 4, "spatial_merge_size": 2}}


class Room:
    """A preparer with its tokenizer and template."""

    def __init__(self, folder: Path) -> None:
        ids = write_tokenizer(folder)
        write_processors(folder, 4, (64, 64 * 64), (64, 10**6))
        self.image, self.video = ids["<|image_pad|>"], ids["<|video_pad|>"]
        spec = read_media(
            folder, CONFIG | {"image_token_id": self.image, "video_token_id": self.video}
        )
        assert spec is not None
        self.spec = spec
        self.tokenizer = load_tokenizer(str(folder))
        self.template = ChatTemplate(TEMPLATE, self.tokenizer)
        self.preparer = self.preparer_of(most={"image": 20, "video": 2})

    def preparer_of(self, **changes: Any) -> MediaPreparer:
        spec: MediaSpec = msgspec.structs.replace(self.spec, **changes)
        return MediaPreparer(spec, self.tokenizer)

    async def ids(self, messages: list[dict[str, Any]], **request: Any) -> tuple[list[int], Any]:
        prepared = await self.preparer.prepare(messages, MediaRequest(**request))
        ids = self.template.render(prepared.messages)
        return self.preparer.expand(ids, prepared.media, field="messages")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("vision"))
    yield room
    room.preparer.close()
    room.template.close()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(width: int, height: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    address = url(encoded(picture(width, height, seed)))
    return {"type": "image_url", "image_url": {"url": address}, **more}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "what is in the image?"}


async def test_images_become_placeholders_where_they_stand(room: Room) -> None:
    messages = [
        *user(image_part(32, 16), TEXT, image_part(16, 16)),
        {"role": "assistant", "content": "a fox"},
        *user(TEXT, image_part(64, 64)),
    ]
    ids, inputs = await room.ids(messages)
    assert [each.grid for each in inputs] == [(1, 4, 8), (1, 4, 4), (1, 16, 16)]
    assert [each.num_tokens for each in inputs] == [8, 4, 64]
    assert ids.count(room.image) == 76
    for each in inputs:
        assert ids[each.offset : each.offset + each.num_tokens] == [room.image] * each.num_tokens
        assert len(each.rows) == each.num_tokens * 4 * 48 and len(each.key) == 32
    text = room.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n<|vision_start|><|image_pad|>")


async def test_a_user_s_text_is_never_a_placeholder(room: Room) -> None:
    spelled = {"type": "text", "text": "<|image_pad|><|vision_start|>"}
    ids, inputs = await room.ids(user(spelled, image_part(16, 16)))
    assert ids.count(room.image) == inputs[0].num_tokens == 4


async def test_frames_of_a_video_stand_between_their_times(room: Room) -> None:
    data = clip([picture(32, 32, i) for i in range(20)])
    part = {"type": "video_url", "video_url": {"url": url(data, "video/mp4")}}
    ids, inputs = await room.ids(user(part, TEXT))
    assert [each.kind for each in inputs] == ["video", "video"]
    text = room.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith(
        "<|im_start|>user\n<|vision_start|><0.3 seconds><|vision_start|><|video_pad|>"
    )
    assert "<|video_pad|><|vision_end|><1.6 seconds><|vision_start|><|video_pad|>" in text
    frames = ",".join(
        base64.b64encode(encoded(picture(16, 16, i), "JPEG")).decode() for i in range(3)
    )
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    assert len((await room.ids(user(part)))[1]) == 2


async def test_the_same_content_has_the_same_key_and_is_processed_once(room: Room) -> None:
    preparer = room.preparer_of()
    first = await preparer.prepare(
        user(image_part(24, 24, 5), image_part(24, 24, 6)), MediaRequest()
    )
    started = preparer._processes._pool.num_started
    preparer._processes.close()
    again = await preparer.prepare(user(image_part(24, 24, 5)), MediaRequest())
    assert again.media[0] is first.media[0]
    assert preparer._processes._pool.num_started == started
    assert first.media[0].inputs[0].key != first.media[1].inputs[0].key
    small = await preparer.prepare(
        user(image_part(24, 24, 5)), MediaRequest(arguments={"max_pixels": 256})
    )
    assert small.media[0].inputs[0].key != first.media[0].inputs[0].key
    preparer.close()


async def test_a_uuid_stands_for_content_of_the_same_tenant(room: Room) -> None:
    sent = await room.ids(user(image_part(16, 24, 9, uuid="logo")), tenant="a")
    known = {"type": "image_url", "image_url": None, "uuid": "logo"}
    assert await room.ids(user(known), tenant="a") == sent
    with pytest.raises(InvalidRequest, match="was not sent yet"):
        await room.ids(user(known), tenant="b")


async def test_settings_of_a_request_stay_within_the_model_s(room: Room) -> None:
    part = image_part(64, 64)
    few = (await room.ids(user(part), arguments={"max_pixels": 1024}))[1][0]
    assert few.grid == (1, 8, 8)
    low = image_part(64, 64)
    low["image_url"]["detail"] = "low"
    assert (await room.ids(user(low)))[1][0].grid == (1, 16, 16)  # 512 x 512 is more
    for arguments, field in (
        ({"max_pixels": 5000}, "max_pixels: 5000 given; allowed: 64 to 4096"),
        ({"min_pixels": 0}, "min_pixels: 0 given"),
        ({"min_pixels": 900, "max_pixels": 100}, "min_pixels: 900 given; max_pixels is 100"),
        ({"max_pixels": True}, "max_pixels: True given"),
        ({"fps": "fast"}, "fps: 'fast' given"),
        ({"code_revision": "main"}, "code_revision: not accepted"),
    ):
        with pytest.raises(InvalidRequest, match=f"^mm_processor_kwargs.{field}"):
            await room.ids(user(part), arguments=arguments)


async def test_numbers_of_media_and_their_tokens_are_bounded(room: Room) -> None:
    with pytest.raises(InvalidRequest, match="21 of kind image given; at most 20 are allowed"):
        await room.ids(user(*[image_part(8, 8)] * 21))
    with pytest.raises(ContextTooLong, match="its media alone have"):
        await room.ids(user(*[image_part(64, 64, i) for i in range(5)]), max_tokens=200)
    none = room.preparer_of(video_token=None)
    with pytest.raises(InvalidRequest, match="this model takes no video"):
        await none.prepare(user({"type": "video_url", "video_url": "data:,"}), MediaRequest())


WRONG = {
    "no url": ({"type": "image_url"}, "image_url: it is missing"),
    "number": ({"type": "image_url", "image_url": 7}, "image_url: int is no address"),
    "detail": ({"type": "image_url", "image_url": {"url": "data:,", "detail": "x"}}, "detail: 'x' given"),
    "no image": ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "none of PNG"),
    "no base64": ({"type": "image_url", "image_url": "data:image/png;base64,*"}, "is not base64"),
    "no comma": ({"type": "image_url", "image_url": "data:image/png"}, "has no comma"),
    "off": ({"type": "image_url", "image_url": "http://x.example/a.png"}, "fetching is off"),
    "local": ({"type": "image_url", "image_url": "file:///etc/passwd"}, "is not set"),
    "file": ({"type": "input_image", "file_id": "file-1"}, "keeps no files"),
    "embeds": ({"type": "image_embeds", "image_embeds": "A"}, "enable-mm-embeds is off"),
    "audio": ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "this model takes no audio"),
    "uuid": ({"type": "image_url", "uuid": ""}, "a text of 1 to 128 characters"),
    "frames": ({"type": "image_url", "image_url": "data:video/jpeg;base64,AAAA,AAAA"}, "is a video, not an image"),
    "many frames": (
        {"type": "video_url", "video_url": f"data:video/jpeg;base64,{'AAAA,' * 1024}AAAA"},
        "1025 frames given; at most 1024 are",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_names_the_part(room: Room, name: str) -> None:
    part, message = WRONG[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        await room.ids(user(TEXT, part))
    assert caught.value.message.startswith("messages[0].content[1]")


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
async def test_only_users_and_tools_show_media(room: Room, role: str) -> None:
    """API-15."""
    with pytest.raises(InvalidRequest, match="is text only"):
        await room.ids([{"role": role, "content": [image_part(8, 8)]}])


async def test_pages_of_a_pdf_are_images(room: Room) -> None:
    data = encoded(
        picture(40, 40), "PDF", save_all=True, append_images=[picture(40, 40, 1)], resolution=144.0
    )
    file = {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": base64.b64encode(data).decode()},
    }
    _, inputs = await room.ids(user(file, TEXT))
    assert [each.grid for each in inputs] == [(1, 10, 10)] * 2 and inputs[0].key != inputs[1].key
    text = {
        "type": "file",
        "file": {"filename": "a.txt", "file_data": base64.b64encode(b"fox").decode()},
    }
    assert has_media(user(text))
    assert "a.txt\nfox" in room.tokenizer.decode((await room.ids(user(text, image_part(8, 8))))[0])


async def test_pixels_of_one_request_are_bounded_together(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what a core takes in one frame."""
    monkeypatch.setattr("headrace.front.media.placeholders.MAX_REQUEST_BYTES", 40_000)
    await room.ids(user(image_part(64, 64, 1), image_part(64, 64, 2)))
    with pytest.raises(InvalidRequest, match=r"take 49152 bytes .* at most 40000") as caught:
        await room.ids(
            user(
                image_part(64, 64, 1),
                image_part(64, 64, 2),
                image_part(64, 64, 3),
                image_part(64, 64, 4),
            )
        )
    # They are decoded beside each other: the one that comes last passes the bound.
    assert re.match(r"messages\[0\]\.content\[[0-3]\]", caught.value.message)


async def test_vectors_stand_among_images_where_their_parts_do(room: Room) -> None:
    """ENG-27: between texts and images of one message; a text cannot stand for them."""
    vectors = np.arange(10, dtype=np.float32).reshape(2, 5)
    preparer = VectorsPreparer(room.preparer, room.tokenizer, width=5, most_tokens=64)
    part = {"type": "prompt_embeds", "data": vectors}
    spelled = {"type": "text", "text": f"a{VECTORS}b"}
    messages = user(part, image_part(32, 16), spelled, {**part, "data": vectors[:1] + 1})
    prepared = await preparer.prepare(messages, MediaRequest())
    ids, inputs = preparer.expand(
        room.template.render(prepared.messages), prepared.media, field="messages"
    )
    assert [(one.kind, one.num_tokens) for one in inputs] == [
        ("prompt", 2),
        ("image", 8),
        ("prompt", 1),
    ]
    assert inputs[0].rows == vectors.tobytes() and inputs[0].key != inputs[2].key
    places = [(one.offset, one.offset + one.num_tokens) for one in inputs]
    assert places == sorted(places) and NO_TOKEN not in ids
    assert ids[slice(*places[1])] == [room.image] * 8
    rest = [token for i, token in enumerate(ids) if not any(a <= i < b for a, b in places)]
    alone, _ = await room.ids(user(image_part(32, 16), spelled))
    assert rest == [token for token in alone if token != room.image]
    with pytest.raises(InvalidRequest, match=r"content\[0\]: a message of role 'system'"):
        await preparer.prepare([{"role": "system", "content": [part]}], MediaRequest())
    with pytest.raises(ContextTooLong, match="its vectors alone stand for 66 tokens > 64"):
        await preparer.prepare(user(*[part] * 33), MediaRequest())


def test_vectors_have_positions_of_text() -> None:
    """Beside an image, whose tokens have those of their windows."""
    scope = Scope(
        ledger=Ledger(),
        mesh=Mesh(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_tokens=16,
        max_positions=64,
    )
    spec = RopeSpec(kind="plain", head_dim=4, frequencies=(1.0, 0.1))
    rope = AxesRope(scope, spec, axis_of_pair=(0, 1), merge=2)
    image = MediaSpan(kind="image", key=bytes(32), offset=6, num_tokens=8, grid=(1, 4, 8))
    sent = MediaSpan(kind="prompt", key=bytes(32), offset=1, num_tokens=3, grid=(1, 1, 3))
    with_vectors = rope.positions((sent, image), 20)
    plain = rope.positions((image,), 20)
    assert np.array_equal(with_vectors.position_3P, plain.position_3P)
    assert with_vectors.delta == plain.delta == -4
