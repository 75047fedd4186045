"""Media by address: http and https under the fetch rules, and local files under one folder.

Nothing is fetched unless its host is on the list of the operator. A host is resolved once, every
address of the answer must be public, and the connection goes to an address that was checked: what
the name resolves to a moment later does not matter. Redirects are followed a few times, each
checked anew. An entry of the list that is a network (10.1.0.0/16) permits its addresses though they
are not public.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

import msgspec

from headrace.base.errors import InvalidRequest

if TYPE_CHECKING:
    import httpx

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_REDIRECTS = (301, 302, 303, 307, 308)
MAX_URL_CHARS = 8192


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one fetch, redirects included."""

    max_bytes: int = 64 << 20
    time_s: float = 20.0
    redirects: int = 3


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a name, or of an address in any spelling that the system knows."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


def is_public(address: Address) -> bool:
    """Whether an address is one of the public network, also where it wraps another."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None or address.scope_id is not None:
            return False
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


class AllowedHosts:
    """The operator's list: names (a leading "." or "*." for all below), "*" for every public host,
    and networks."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.networks: list[Network] = []
        self._names: set[str] = set()
        self._below: list[str] = []
        self._any = False
        for entry in entries:
            self._add(entry.strip().lower())

    def _add(self, entry: str) -> None:
        try:
            self.networks.append(ipaddress.ip_network(entry))
            return
        except ValueError:
            pass
        if entry == "*":
            self._any = True
        elif entry.startswith(("*.", ".")):
            self._below.append("." + entry.lstrip("*."))
        elif entry:
            self._names.add(entry.rstrip("."))

    def __bool__(self) -> bool:
        return bool(self.networks or self._names or self._below or self._any)

    def names(self, host: str) -> bool:
        """Whether a host, as it stands in an address, is on the list."""
        host = host.lower().rstrip(".")
        if self._any or host in self._names or host.endswith(tuple(self._below)):
            return True
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(literal in network for network in self.networks)

    def permits(self, address: str) -> bool:
        """Whether a resolved address may be connected to."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return is_public(parsed) or any(parsed in network for network in self.networks)


class Fetcher:
    """Fetches by address. Errors name the field and never what a name resolved to."""

    def __init__(
        self,
        hosts: AllowedHosts,
        limits: FetchLimits | None = None,
        *,
        resolve: Resolve = resolve_host,
    ) -> None:
        self._hosts = hosts
        self._limits = limits or FetchLimits()
        self._resolve = resolve
        if hosts:
            _httpx()  # now: later, streams would wait for its import

    async def get(self, url: str, field: str) -> bytes:
        """The content; InvalidRequest for what is not allowed, too large, too slow or absent."""
        if not self._hosts:
            raise _bad(
                field,
                "fetching is off on this server; send the content as a data URL "
                "(--allowed-media-domains names hosts to fetch from)",
            )
        http = _httpx()
        try:
            async with asyncio.timeout(self._limits.time_s):
                return await self._followed(url, field)
        except TimeoutError:
            raise _bad(field, f"no answer within {self._limits.time_s:g} s") from None
        except (http.HTTPError, http.InvalidURL, OSError, UnicodeError):
            raise _bad(field, "it cannot be fetched") from None

    async def _followed(self, url: str, field: str) -> bytes:
        async with _httpx().AsyncClient(
            trust_env=False, follow_redirects=False, timeout=self._limits.time_s, verify=_trust()
        ) as client:
            for _ in range(self._limits.redirects + 1):
                target = self._checked(url, field)
                answer = await self._once(client, target, field)
                if isinstance(answer, bytes):
                    return answer
                url = str(target.join(answer))
        raise _bad(field, f"more than {self._limits.redirects} redirects")

    def _checked(self, url: str, field: str) -> httpx.URL:
        if len(url) > MAX_URL_CHARS:
            raise _bad(field, f"{len(url)} characters; at most {MAX_URL_CHARS} are allowed")
        if not url.isprintable() or any(character in url for character in "\\ \t\r\n"):
            raise _bad(field, "characters that no address may have")
        target: httpx.URL = _httpx().URL(url)
        if target.scheme not in ("http", "https"):
            raise _bad(field, f"{target.scheme!r:.20} given; allowed: http, https, data")
        if target.userinfo or not target.host or "%" in target.host:
            raise _bad(field, "an address with a host and without a user is needed")
        if not self._hosts.names(target.host):
            raise _bad(
                field,
                f"{target.host:.200}: media are not fetched from there; allowed are the hosts of "
                "--allowed-media-domains",
            )
        return target

    async def _once(self, client: httpx.AsyncClient, target: httpx.URL, field: str) -> bytes | str:
        """The content, or where to look instead."""
        port = target.port or (443 if target.scheme == "https" else 80)
        addresses = list(dict.fromkeys(await self._resolve(target.host, port)))
        if not addresses or not all(self._hosts.permits(each) for each in addresses):
            raise _bad(field, "the host is not on the public network")
        request = client.build_request(
            "GET",
            target.copy_with(host=addresses[0], fragment=None),
            headers={
                "Host": target.netloc.decode("ascii"),
                "Accept-Encoding": "identity",
                "User-Agent": "headrace",
            },
            extensions={"sni_hostname": target.raw_host.decode("ascii")},
        )
        response = await client.send(request, stream=True)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(response.headers["location"])
            if response.status_code != 200:
                raise _bad(field, f"the host answers {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise _bad(field, "the host sends it compressed, which is not accepted")
            return await self._body(response, field)
        finally:
            await response.aclose()

    async def _body(self, response: httpx.Response, field: str) -> bytes:
        most = self._limits.max_bytes
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most:
                raise _bad(field, f"more than {most} bytes; so many are allowed")
        return bytes(body)


def _httpx() -> ModuleType:
    """Its import takes 0.09 s of each server's start, which most need for nothing."""
    import httpx

    return httpx


@cache
def _trust() -> ssl.SSLContext:
    """The root certificates, read once: that takes longer than a small fetch."""
    context: ssl.SSLContext = _httpx().create_ssl_context(trust_env=False)
    return context


def read_local(url: str, root: str | None, max_bytes: int, field: str) -> bytes:
    """A file: URL below `root`, links resolved. What lies elsewhere and what is not there look the
    same."""
    refused = _bad(field, "there is no such file below --allowed-local-media-path")
    if root is None:
        raise _bad(
            field, "files of the server are not read (--allowed-local-media-path is not set)"
        )
    host, _, path = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise refused
    try:
        file = Path("/" + unquote(path)).resolve()
        if not file.is_relative_to(Path(root).resolve()) or not file.is_file():
            raise refused
        if file.stat().st_size > max_bytes:
            raise _bad(field, f"more than {max_bytes} bytes; so many are allowed")
        return file.read_bytes()
    except (OSError, ValueError):
        raise refused from None


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)
