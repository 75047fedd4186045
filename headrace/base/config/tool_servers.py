"""Servers of tools (MCP) that the operator names: `[LABEL=]HOST:PORT[/PATH]` or `[LABEL=]URL`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from headrace.base.errors import ConfigError

MAX_SERVERS = 64
_PATH = "/mcp"
_LABELLED = re.compile(r"(?:(?P<label>[A-Za-z][A-Za-z0-9_-]{0,63})=)?(?P<address>\S+)")
_ADDRESS = re.compile(
    r"(?P<scheme>https?://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?"
    r"(?P<path>/[!-~]*)?"
)


@lru_cache(maxsize=4)  # each response asks
def tool_servers(entries: tuple[str, ...]) -> Mapping[str, str]:
    """Label -> URL; ConfigError for what is none. Without a label it is HOST:PORT."""
    servers: dict[str, str] = {}
    for entry in entries:
        named = _LABELLED.fullmatch(entry.strip())
        match = None if named is None else _ADDRESS.fullmatch(named["address"])
        if named is None or match is None or not (match["scheme"] or match["port"]):
            raise ConfigError(
                f"--tool-server {entry!r:.200}: [LABEL=]HOST:PORT[/PATH] or [LABEL=]URL is expected",
                field="tool_server",
            )
        place = match["host"] + (f":{match['port']}" if match["port"] else "")
        label = named["label"] or place
        if label in servers:
            raise ConfigError(
                f"--tool-server: two servers have the label {label!r}", field="tool_server"
            )
        servers[label] = f"{match['scheme'] or 'http://'}{place}{match['path'] or _PATH}"
    if len(servers) > MAX_SERVERS:
        raise ConfigError(
            f"--tool-server: {len(servers)} given, at most {MAX_SERVERS} are allowed",
            field="tool_server",
        )
    return servers
