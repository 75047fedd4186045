"""Images and video through the whole server, by the clients' own SDKs: the greedy answer of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import grpc
import openai
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace.front.media.processing import Sampling
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor
from headrace.front.server.grpc.service import SERVING
from tests.e2e.seeing import (
    IMAGE_BOUNDS,
    NUM_TOKENS,
    SEEN,
    Seeing,
    chat,
    image,
    served_seeing,
    text,
    url,
)
from tests.front.media.pictures import animated, clip, encoded, picture


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("vision") / "seeing"
    with served_seeing(
        folder, "--allowed-local-media-path", str(folder), "--grpc-port", "0"
    ) as seeing:
        yield seeing


def test_an_answer_about_an_image_is_the_reference_s(seeing: Seeing) -> None:
    for size in ((40, 24), (61, 43), (8, 8), (200, 31)):
        one = picture(*size, seed=size[0])
        answer = seeing.ask(image(encoded(one)), text("what is in the image?"))
        expected = seeing.answer(chat(SEEN + "what is in the image?"), [one])
        assert answer.choices[0].message.content == expected, size
        grid = Qwen2VLImageProcessorPil(
            patch_size=4, size={"shortest_edge": IMAGE_BOUNDS[0], "longest_edge": IMAGE_BOUNDS[1]}
        )(one)["image_grid_thw"][0]
        assert answer.usage.prompt_tokens > grid.prod() // 4


def test_several_images_stream_and_repeat(seeing: Seeing) -> None:
    first, second = picture(30, 50, 1), picture(64, 20, 2)
    parts = [image(encoded(first)), text("fox and"), image(encoded(second)), text("dog?")]
    expected = seeing.answer(chat(f"{SEEN}fox and{SEEN}dog?"), [first, second])
    plain = seeing.ask(*parts)
    assert plain.choices[0].message.content == expected
    chunks = seeing.ask(*parts, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == expected
    again = seeing.ask(*parts)
    assert again.choices[0].message.content == expected
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_video_is_the_reference_s(seeing: Seeing) -> None:
    data = clip([picture(48, 32, i) for i in range(30)], Fraction(10))
    spec = read_media(seeing.folder, json.loads((seeing.folder / "config.json").read_text()))
    assert spec is not None
    processor = QwenVisionProcessor(spec.settings)
    frames = [picture(24, 24, i) for i in range(6)]
    gif = animated(frames, "PNG", 500)
    medium = processor.video(iter(frames), range(6), Sampling(6, 2.0))
    answer = seeing.ask({"type": "video_url", "video_url": {"url": url(gif)}}, text("what?"))
    prompt = chat("<|vision_start|><|video_pad|><|vision_end|>what?")
    assert answer.choices[0].message.content == seeing.answer(prompt, [], medium)
    whole = seeing.ask({"type": "video_url", "video_url": {"url": url(data, "video/mp4")}})
    assert whole.choices[0].message.content


def test_tokenize_counts_the_tokens_of_media(seeing: Seeing) -> None:
    parts = [image(encoded(picture(40, 24))), text("what is in the image?")]
    answer = seeing.ask(*parts)
    body = {"messages": [{"role": "user", "content": parts}]}
    reply = seeing.served.post("/tokenize", body).json()
    assert reply["count"] == answer.usage.prompt_tokens
    assert reply["tokens"].count(seeing.ids["<|image_pad|>"]) == 3 * 5


def test_text_beside_images_is_answered_as_alone(seeing: Seeing) -> None:
    words = "the quick brown fox"
    answer = seeing.ask(text(words))
    assert answer.choices[0].message.content == seeing.answer(chat(words), [])


def test_a_local_file_below_the_folder_is_read(seeing: Seeing) -> None:
    one = picture(40, 24)
    (seeing.folder / "a.png").write_bytes(encoded(one))
    part = {"type": "image_url", "image_url": {"url": f"file://{seeing.folder}/a.png"}}
    answer = seeing.ask(part, text("what?"))
    assert answer.choices[0].message.content == seeing.answer(chat(SEEN + "what?"), [one])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image(b"no image"), r"messages\[0\].content\[0\].image_url.url: the file is none of PNG"),
        (image(encoded(picture(9, 9), "JPEG")[:300]), "cannot be decoded"),
        (image(encoded(picture(2010, 10))), "one side may be at most 200 times"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "fetching is off"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "there is no such file"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "takes no audio"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_a_bad_request(seeing: Seeing, part: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        seeing.ask(part, text("what?"))
    with pytest.raises(openai.BadRequestError, match=r"mm_processor_kwargs.revision: not accepted"):
        seeing.ask(
            image(encoded(picture(9, 9))), extra_body={"mm_processor_kwargs": {"revision": "x"}}
        )


HOSTILE = [
    b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + bytes(99), b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"%PDF-1.7", b"<svg/>",
    *(encoded(picture(64, 64), form)[:cut] for form in ("PNG", "JPEG", "WEBP", "GIF") for cut in (40, 200, 400)),
    b"\x89PNG\r\n\x1a\n" + encoded(picture(30, 30), "JPEG"), encoded(picture(8, 8), "TIFF"),
]  # fmt: skip


def test_hostile_files_harm_no_bystander(seeing: Seeing) -> None:
    """P7, P10, T10: every one is a bad request; answers beside them stay what they are, and no process is replaced."""
    one = picture(40, 24)
    parts = [image(encoded(one)), text("what is in the image?")]
    expected = seeing.answer(chat(SEEN + "what is in the image?"), [one])
    cores = {process.pid for process in (*seeing.served.cores, *seeing.served.api_processes)}

    def attack(data: bytes) -> int:
        message = {"role": "user", "content": [image(data), text("x")]}
        return seeing.served.post("/v1/chat/completions", {"messages": [message]}).status_code

    def bystand(_: int) -> str:
        return seeing.ask(*parts).choices[0].message.content

    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(bystand, range(24))
        statuses = list(pool.map(attack, HOSTILE * 3))
        assert set(answers) == {expected}
    assert set(statuses) == {400}
    assert cores == {
        process.pid for process in (*seeing.served.cores, *seeing.served.api_processes)
    }


def test_grpc_takes_images_beside_the_prompt(seeing: Seeing) -> None:
    line = next(line for line in seeing.served.lines if "headrace serves gRPC: " in line)
    one = picture(40, 24)
    (service,) = [s for s in SERVING if s.full_name == "vllm.Inference"]
    fields = {
        "text": chat(SEEN + "what is in the image?"),
        "media": [encoded(one)],
        "response": {"output_text": True},
        "stopping": {"max_new_tokens": NUM_TOKENS},
        "temperature": 0.0,
    }
    with grpc.insecure_channel(line.split("gRPC: ")[1].split()[0]) as channel:
        stub = channel.unary_unary(
            f"/{service.full_name}/Generate",
            request_serializer=service.request("Generate").SerializeToString,
            response_deserializer=service.response("Generate").FromString,
        )
        answer = stub(service.request("Generate")(**fields), timeout=300)
        assert answer.outputs.text == seeing.answer(fields["text"], [one])
        with pytest.raises(grpc.RpcError) as caught:
            stub(service.request("Generate")(**{**fields, "text": "fox"}), timeout=300)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
