"""GET / and its files, read once at start. They hold no secrets, so they need no key; what they ask
the API for does.

The files are named one by one (pages.py): a path that is not there does not exist, whatever lies on
the disk. The content security policy lets the page load and call nothing but this server, and run
no script that is not one of them."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.webui.pages import PAGES

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FOLDER = files(__package__) / "page"
_BODIES = {path: (_FOLDER / name).read_bytes() for path, (name, _) in PAGES.items()}
_TAGS = {path: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for path, body in _BODIES.items()}


async def get_page(context: RequestContext, request: Request) -> Response:
    """One file of the page; 304 if the browser has it."""
    path = request.url.path
    headers = {**_HEADERS, "etag": _TAGS[path]}
    if request.headers.get("if-none-match") == _TAGS[path]:
        return Response(status_code=304, headers=headers)
    return Response(_BODIES[path], media_type=PAGES[path][1], headers=headers)
