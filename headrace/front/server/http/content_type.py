"""What a body with a JSON document may call itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.errors import UnsupportedMedia

if TYPE_CHECKING:
    from starlette.requests import Request


def check_content_type(request: Request) -> None:
    """Raises UnsupportedMedia unless it is JSON by name, so that no page of another origin can send
    it without being asked first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not _is_as_ollamas_docs_send(request, kind):
        raise UnsupportedMedia(
            f"content-type {kind[:100]!r} is not supported; send application/json"
        )


def _is_as_ollamas_docs_send(request: Request, kind: str) -> bool:
    """`curl -d` calls JSON a form. No page sends so: a browser names the page's origin."""
    plain = kind in ("", "application/x-www-form-urlencoded")
    return plain and request.url.path.startswith("/api/") and "origin" not in request.headers
