"""The official clients as tests use them: no retries, and no root certificates read for connections without TLS.

Every worker imports every file of tests; Anthropic's client is 3,200 modules (2 processor seconds, 6 where they are not
compiled yet), so that `anthropic` here is imported by the workers that use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import openai

from tests.api.serving import NO_TLS


class Deferred:
    """A package that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(
            "_"
        ):  # pytest asks everything in a module whether it wraps a fixture
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


anthropic: Any = Deferred("anthropic")


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    """A client of the server at `url`."""
    plain = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, http_client=plain)


def anthropic_client(url: str, key: str) -> anthropic.Anthropic:
    """A client of the server at `url`."""
    plain = anthropic.DefaultHttpxClient(verify=NO_TLS)
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=plain)
