"""Pictures of the web page for docs/WEBUI.md: `python -m benchmarks.screenshots` (make screenshots).

A real server with the bundled model, a real Chromium (CHROMIUM, or the one on the path), both views
at the width of a desk and of a phone, light and dark; the engine's view beside a few requests. The
pictures have 256 colors, which is enough for these pages, and are written to docs/images.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTHS = {"desk": (1280, 880), "phone": (390, 844)}
THEMES = ("light", "dark")
USERS = 6
QUESTIONS = ("Hello! Who are you?", "What is 17 + 25?", "Tell me a short story.")
READY = re.compile(r"headrace is ready: (http://\S+)")


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server with the bundled model."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(match[1] for line in process.stdout if (match := READY.search(line)))
        finally:
            process.terminate()


def converse(page: Any) -> None:
    """A short chat, greedy, so that the pictures change only with the page."""
    page.locator("#model option").first.wait_for(state="attached")
    page.evaluate("document.getElementById('panel').open = true")
    page.fill("#temperature", "0")
    if page.viewport_size["width"] < 800:
        page.evaluate("document.getElementById('panel').open = false")
    for number, question in enumerate(QUESTIONS):
        page.fill("#composer-text", question)
        page.keyboard.press("Enter")
        page.locator(".message.assistant .actions").nth(number).wait_for(timeout=60_000)


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Meanwhile some clients generate, one request after another."""
    done = threading.Event()

    def generate() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 80, "ignore_eos": True}
        while not done.is_set():
            httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    users = [threading.Thread(target=generate) for _ in range(USERS)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        done.set()
        for user in users:
            user.join()


def save(picture: bytes, path: Path) -> int:
    """Writes it with few colors; its bytes."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    return path.stat().st_size


def main() -> int:
    """Writes the pictures and prints their sizes."""
    chromium = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )
    if chromium is None:
        print("no Chromium on the path; CHROMIUM names one", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    total = 0
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height) in WIDTHS.items():
            for theme in THEMES:
                page = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=theme
                ).new_page()
                page.goto(url + "/")
                page.click(".tab[data-view=engine]")
                page.click(".tab[data-view=chat]")
                converse(page)
                total += save(page.screenshot(), FOLDER / f"chat-{name}-{theme}.png")
                page.click(".tab[data-view=engine]")
                with busy(url):
                    page.wait_for_timeout(12_000)  # a dozen of the view's own polls
                    total += save(page.screenshot(), FOLDER / f"engine-{name}-{theme}.png")
                page.context.close()
        browser.close()
    print(f"{total / 1024:.0f} KiB in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
