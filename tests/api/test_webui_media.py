"""The page with images and speech, in a real Chromium: images are dropped and pasted, shown and asked about; what is
said into a (fake) microphone is written into the message field."""

from __future__ import annotations

import io
import shutil
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench.held_out import HEARD, SEEN, read_items
from headrace.front.media.job import DecodingLimits
from headrace.front.media.log_mel import RATE
from headrace.front.media.sound import samples_of, sound
from tests.api.clients import openai_client
from tests.api.serving import Served, serving
from tests.api.test_webui import say

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TRANSFER = """([data, kind]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "picture.png", { type: "image/png" }));
  const place = kind === "drop" ? document.body : document.getElementById("composer-text");
  const name = kind === "drop" ? "dataTransfer" : "clipboardData";
  const made = kind === "drop" ? DragEvent : ClipboardEvent;
  place.dispatchEvent(new made(kind, { [name]: transfer, bubbles: true, cancelable: true }));
}"""


@contextmanager
def opened(served: Served, *flags: str) -> Iterator[Any]:
    """A page of a Chromium with these flags; faults of its scripts fail the test."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", *flags]
        )
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.grant_permissions(["microphone"], origin=served.url)
        page, faults = context.new_page(), []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(served.url + "/")
        page.locator("#model option").first.wait_for(state="attached")
        yield page
        browser.close()
        assert faults == []


def pictures(task: str) -> list[tuple[str, str, str]]:
    """Items with one picture each: its file in base64, the question, the answer."""
    found = []
    for item in read_items(SEEN)[task]:
        (image, text) = item.messages[0]["content"]
        found.append((image["image_url"]["url"].split(",", 1)[1], text["text"], item.expected))
    return found


def test_images_are_dropped_pasted_shown_and_asked_about() -> None:
    """A word and a number: the answers are those of the API for the same picture."""
    with serving(None, "--demo", "vision", "--threads", "1") as served, opened(served) as page:
        page.fill("#temperature", "0")
        client = openai_client(served.url)
        for kind, task in (("drop", "read_word"), ("paste", "read_number")):
            data, question, _ = pictures(task)[0]
            content = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "text", "text": question},
            ]
            expected = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": content}],
                temperature=0,
            )
            page.keyboard.press("Control+k")
            page.evaluate(TRANSFER, [data, kind])
            waiting = page.locator("#waiting-images img")
            waiting.wait_for()
            assert waiting.get_attribute("src") == f"data:image/png;base64,{data}"
            say(page, question)
            assert page.locator("#waiting-images").is_hidden()
            assert page.locator(".message.user img").get_attribute("src").endswith(data)
            answer = page.locator(".message.assistant .body").inner_text().strip()
            assert answer == expected.choices[0].message.content.strip() and answer
        client.close()


def test_a_file_that_is_no_image_is_refused_and_images_can_be_taken_back() -> None:
    with serving(None, "--demo", "vision", "--threads", "1") as served, opened(served) as page:
        page.evaluate(TRANSFER.replace("image/png", "text/plain"), ["aGVsbG8=", "drop"])
        page.locator("#toast", has_text="PNG, JPEG, WebP and GIF").wait_for()
        assert page.locator("#waiting-images img").count() == 0
        page.evaluate(TRANSFER, [pictures("read_word")[0][0], "drop"])
        page.locator("#waiting-images button").click()
        assert page.locator("#waiting-images").is_hidden()


def spoken(folder: Path) -> tuple[Path, str]:
    """A clean sentence as a 48 kHz file of a microphone, with silence around it; and what is said."""
    item = read_items(HEARD)["en"][1]
    samples = samples_of(sound(item.audio, DecodingLimits()))
    padded = np.pad(samples, (RATE // 2, 8 * RATE))
    times = np.arange(3 * len(padded)) / 3
    wide = np.interp(times, np.arange(len(padded)), padded).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(3 * RATE)
        file.writeframes(wide.tobytes())
    path = folder / "spoken.wav"
    path.write_bytes(buffer.getvalue())
    return path, item.expected


def test_what_is_said_is_written_into_the_message_field(tmp_path: Path) -> None:
    path, expected = spoken(tmp_path)
    flags = (
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={path}%noloop",
    )
    with (
        serving(None, "--demo", "speech", "--threads", "1") as served,
        opened(served, *flags) as page,
    ):
        page.click("#record")
        page.locator("#record[aria-pressed=true]").wait_for()
        page.wait_for_timeout(5000)
        page.click("#record")
        page.locator("#record:not([disabled])[aria-pressed=false]").wait_for(timeout=60_000)
        heard = page.input_value("#composer-text")
        assert heard.lower().strip(" .") == expected.lower().strip(" .")
        page.click("#record")  # and once more, for nothing
        page.locator("#record[aria-pressed=true]").wait_for()
        page.keyboard.press("Escape")
        page.locator("#record[aria-pressed=false]").wait_for()
        assert page.input_value("#composer-text") == heard


def test_a_model_that_does_not_hear_says_so(tmp_path: Path) -> None:
    path, _ = spoken(tmp_path)
    flags = (
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={path}",
    )
    with serving(None, "--threads", "1") as served, opened(served, *flags) as page:
        page.click("#record")
        page.wait_for_timeout(500)
        page.click("#record")
        page.locator("#toast", has_text="does not hear").wait_for()
