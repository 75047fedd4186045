"""The files of the page, by the path they are served under."""

from __future__ import annotations

from collections.abc import Mapping

PAGES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/ui/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/ui/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/ui/engine.js": ("engine.js", "text/javascript; charset=utf-8"),
    "/ui/images.js": ("images.js", "text/javascript; charset=utf-8"),
    "/ui/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/ui/microphone.js": ("microphone.js", "text/javascript; charset=utf-8"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path -> file beside this one, and its type. `table.PUBLIC` lets exactly these through without a
key."""
