"""Ids that go out to people. All are random and made here; what a client sends is at most a
label."""

from __future__ import annotations

import hashlib
import re
import secrets

_LABEL = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


ID_HEADERS = (b"x-request-id", b"request-id")
"""What the clients of each vendor read."""


_OURS = re.compile(r"[a-z]+[-_][0-9a-f]{32}(-\d{1,6})?")
RESPONSE_PREFIX, CONVERSATION_PREFIX = "resp_", "conv_"


def request_id() -> str:
    """The id of one HTTP context, sent back as x-request-id and request-id."""
    return "req-" + secrets.token_hex(16)


def completion_id(kind: str) -> str:
    """The public id of one generation: `chatcmpl-...` or `cmpl-...`."""
    return f"{kind}-{secrets.token_hex(16)}"


def own_id(tenant: str, asked: str) -> str:
    """The public id of a generation that its client wants to name by an id of its own: nobody else
    can tell it, and the same name of another tenant is another id."""
    return "gen-" + hashlib.sha256(f"{tenant}\0{asked}".encode()).hexdigest()[:32]


def client_label(value: bytes | None) -> str | None:
    """A client's X-Request-Id if it is well formed (1 to 128 harmless characters), else None."""
    if value is None or _LABEL.fullmatch(value) is None:
        return None
    return value.decode("ascii")


def message_id() -> str:
    """The public id of one message of the Anthropic dialect."""
    return "msg_" + secrets.token_hex(16)


def response_id() -> str:
    """The public id of one response; the ids of its items are made from it."""
    return RESPONSE_PREFIX + secrets.token_hex(16)


def conversation_id() -> str:
    """The public id of one conversation of the Responses dialect."""
    return CONVERSATION_PREFIX + secrets.token_hex(16)


def is_ours(ident: str) -> bool:
    """Whether an id has the form of those made here: random, so that knowing it is the permission
    to ask about what it names."""
    return _OURS.fullmatch(ident) is not None
