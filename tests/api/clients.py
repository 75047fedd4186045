"""The official clients as tests use them: no retries, and no root certificates read for connections without TLS."""

from __future__ import annotations

import anthropic
import openai

from tests.api.serving import NO_TLS


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    """A client of the server at `url`."""
    plain = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, http_client=plain)


def anthropic_client(url: str, key: str) -> anthropic.Anthropic:
    """A client of the server at `url`."""
    plain = anthropic.DefaultHttpxClient(verify=NO_TLS)
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=plain)
