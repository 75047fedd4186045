"""The table of routes: none hides another."""

from __future__ import annotations

from starlette.routing import Match

from headrace.front.server.table import table


def test_every_route_is_reached_by_its_own_path() -> None:
    routes = table()
    for route in routes:
        for method in route.described if "{" not in route.path else ():
            scope = {"type": "http", "method": method, "path": route.path, "headers": []}
            first = next(each for each in routes if each.matches(scope)[0] is Match.FULL)
            assert first is route, (method, route.path, first.path)
