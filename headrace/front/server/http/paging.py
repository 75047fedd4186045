"""Lists of items in pages: `order`, `limit` and `after` of a query."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from headrace.base.errors import InvalidRequest

Json = dict[str, Any]
MAX_LISTED = 100


def page_of(request: Request, items: list[Json], *, order: str = "desc") -> Json:
    """The page of `items` (oldest first) that the query asks for; `order`: unless it says one."""
    items = list(items)
    order = request.query_params.get("order", order)
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


def page_of_ids(request: Request, ids: list[str], *, of: str) -> tuple[list[str], bool]:
    """The page of ids that the query asks for (`limit`, and `after_id` or `before_id`), and whether
    there is more in its direction. `of`: what they name."""
    limit = number_of(request, "limit", default=20, least=1, most=1000)
    after, before = (request.query_params.get(name) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        raise InvalidRequest(
            "before_id: does not go with after_id; send one of them", field="before_id"
        )
    for field, cursor in (("after_id", after), ("before_id", before)):
        if cursor is not None and cursor not in ids:
            raise InvalidRequest(f"{field}: there is no {of} {cursor[:80]!r}", field=field)
    if before is not None:
        rest = ids[: ids.index(before)]
        return rest[-limit:], len(rest) > limit
    rest = ids if after is None else ids[ids.index(after) + 1 :]
    return rest[:limit], len(rest) > limit


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
