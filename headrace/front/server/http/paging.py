"""Lists of items in pages: `order`, `limit` and `after` of a query."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from headrace.base.errors import InvalidRequest

Json = dict[str, Any]
MAX_LISTED = 100


def page_of(request: Request, items: list[Json]) -> Json:
    """The page of `items` (oldest first) that the query asks for."""
    items = list(items)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: {order[:50]!r} given; allowed: asc, desc", field="order")
    limit = number_of(request, "limit", default=20, least=1, most=MAX_LISTED)
    if order == "desc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise InvalidRequest(f"after: no item {after[:80]!r} here", field="after")
        items = items[at + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, "has_more": len(items) > limit, **ends}


def number_of(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    """A number of the query within its bounds."""
    value = request.query_params.get(name)
    return default if value is None else number(value, name, least=least, most=most)


def number(text: str, name: str, *, least: int, most: int) -> int:
    """A number that came as text, within its bounds."""
    is_short = text.isascii() and text.isdigit() and len(text) <= 10
    if not (is_short and least <= int(text) <= most):
        raise InvalidRequest(
            f"{name}: {text[:50]!r} given; allowed: a number from {least} to {most}", field=name
        )
    return int(text)
