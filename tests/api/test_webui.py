"""The page at `/`: its files over real sockets, and the page itself in a real Chromium where one is installed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.front.server.webui.pages import PAGES
from tests.api.serving import Served, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_every_file_comes_without_a_key_and_under_a_strict_policy(model: Path) -> None:
    with serving(model, "--api-keys", "secret-key-1") as guarded:
        for path, (_, kind) in PAGES.items():
            answer = guarded.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"] == kind
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            again = guarded.get(path, **{"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content
        assert guarded.get("/v1/models").status_code == 401
        for path in ("/ui/", "/ui/../auth.py", "/ui/%2e%2e/auth.py", "/ui/app.js/", "//"):
            assert guarded.get(path).status_code == 401


def test_the_page_asks_nobody_else_and_names_only_files_that_exist(demo: Served) -> None:
    for path in PAGES:
        text = demo.get(path).text
        named = re.findall(r"""(?:src|href|from)\s*=?\s*["'](/[^"']*)["']""", text)
        assert set(named) <= set(PAGES), path
        elsewhere = re.findall(r"https?://[\w.-]+\.\w+", text)
        assert set(elsewhere) <= {"http://www.w3.org"}, path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, demo: Served) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened, faults = context.new_page(), []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    opened.goto(demo.url + "/")
    opened.locator("#model option").first.wait_for(state="attached")
    yield opened
    context.close()
    assert faults == []


def say(page: Any, text: str) -> None:
    answers = page.locator(".message.assistant").count()
    page.fill("#composer-text", text)
    page.keyboard.press("Enter")
    page.locator(".message.assistant .actions").nth(answers).wait_for(timeout=60_000)


def test_no_icon_is_a_character_of_a_symbol_font(demo: Served) -> None:
    """Arrows, technical signs, shapes, dingbats and emoji are missing on machines without such a font."""
    ranges = [
        (0x2190, 0x21FF),
        (0x2300, 0x23FF),
        (0x25A0, 0x27BF),
        (0x2B00, 0x2BFF),
        (0x1F000, 0x1FAFF),
    ]
    pages = {path: demo.get(path).text for path in PAGES}
    symbols = {
        (path, char)
        for path, text in pages.items()
        for char in text
        if any(first <= ord(char) <= last for first, last in ranges)
    }
    assert symbols == set()
    assert pages["/"].count("<svg") >= 5, "the icons are drawn"


def test_a_chat_streams_and_can_be_copied(page: Any) -> None:
    page.fill("#temperature", "0")
    say(page, "What is 17 + 25?")
    assert page.locator(".message.assistant .body").inner_text().strip() == "42"
    assert "tokens" in page.locator(".message.assistant .actions").inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-python")
    code = page.evaluate("navigator.clipboard.readText()")
    compile(code, "copied", "exec")
    assert "17 + 25" in code and "temperature=0" in code
    page.click("#copy-curl")
    command = page.evaluate("navigator.clipboard.readText()")
    body = json.loads(command.split("-d '", 1)[1].rstrip().removesuffix("'"))
    assert body["messages"][0] == {"role": "user", "content": "What is 17 + 25?"}
    page.keyboard.press("Control+k")
    assert page.locator(".message").count() == 0


def test_reasoning_is_folded_and_kept_over_a_reload(page: Any) -> None:
    page.select_option("#thinking", "on")
    page.fill("#temperature", "0")
    say(page, "What is 17 + 25?")
    folded = page.locator("details.reasoning")
    assert folded.count() == 1 and not folded.evaluate("element => element.open")
    page.reload()
    page.locator("details.reasoning summary").wait_for()
    assert page.locator(".message.user .body").inner_text() == "What is 17 + 25?"


def test_an_answer_can_be_stopped(page: Any) -> None:
    page.fill("#composer-text", "Tell me a short story.")
    page.keyboard.press("Enter")
    page.locator("#stop").wait_for()
    page.keyboard.press("Escape")
    page.locator(".message.assistant .actions", has_text="stopped").wait_for()


WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
    },
}


def test_a_tool_call_is_shown_answered_and_shared(page: Any) -> None:
    page.fill("#temperature", "0")
    page.fill("#tools", json.dumps([{"type": "function", "function": WEATHER}]))
    say(page, "What is the weather in Paris?")
    call = page.locator(".call")
    assert call.locator("strong").inner_text() == "get_weather"
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Paris"}
    assert "000 tok/s" not in page.locator(".actions").last.inner_text()
    call.locator("textarea").fill('{"city": "Paris", "temperature": 18, "condition": "sunny"}')
    call.get_by_text("Give result").click()
    page.locator(".message.assistant .actions").nth(1).wait_for(timeout=60_000)
    assert "Paris" in page.locator(".message.assistant .body").last.inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-python")
    code = page.evaluate("navigator.clipboard.readText()")
    compile(code, "copied", "exec")
    assert "tools=" in code and "tool_call_id" in code


def test_the_keyboard_reaches_everything(page: Any) -> None:
    """Tab goes from the skip link over every control, none of which is a trap, and all of which have a name."""
    seen = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
        )
    for wanted in (
        "Skip to the message field",
        "Chat",
        "Engine",
        "model",
        "theme",
        "composer-text",
        "copy-curl",
    ):
        assert wanted in seen, wanted
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, select")].filter((e) => e.offsetParent &&
          !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.slow
def test_several_models_can_be_chosen(browser: Any) -> None:
    with serving(None, "--threads", "1", "--served-model-name", "one,two") as served:
        opened = browser.new_page()
        opened.goto(served.url + "/")
        opened.locator("#model option").nth(1).wait_for(state="attached")
        assert opened.locator("#model option").all_inner_texts() == ["one", "two"]
        opened.select_option("#model", "two")
        with opened.expect_request("**/v1/chat/completions") as asked:
            say(opened, "What is 2 + 2?")
        assert asked.value.post_data_json["model"] == "two"
        opened.close()


def test_what_a_model_writes_never_becomes_markup(page: Any) -> None:
    text = "<img src=x onerror=alert(1)> [x](javascript:alert(1)) **<script>bad()</script>**"
    found = page.evaluate(
        """async (text) => {
          const { markdown } = await import("/ui/markdown.js");
          const place = document.createElement("div");
          place.append(...markdown(text));
          return [place.querySelectorAll("img, script, a").length, place.textContent];
        }""",
        text,
    )
    assert found == [0, text.replace("**", "")]


def test_the_live_view_shows_the_engine(page: Any) -> None:
    say(page, "What is 2 + 2?")
    page.click("[data-view=engine]")
    page.locator(".tile", has_text="serving").wait_for()
    assert page.locator("#ttft .count").count() > 0
    assert page.locator("#blocks").inner_text().count("\n") >= 4


def test_it_fits_a_phone(browser: Any, demo: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme="dark")
    phone = context.new_page()
    phone.goto(demo.url + "/")
    phone.locator("#send").wait_for()
    for view in ("chat", "engine"):
        phone.click(f"[data-view={view}]")
        assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    phone.click("[data-view=chat]")
    name = phone.locator("#model option").first.inner_text()
    wide = phone.locator("#model").bounding_box()["width"]
    assert wide > 9 * min(len(name), 12), "the model's name is cut"
    assert phone.locator("#send").bounding_box()["y"] + 30 < 640
    context.close()
