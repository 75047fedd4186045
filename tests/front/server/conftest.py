"""The client's fixtures: an engine client over scripted cores."""

from tests.front.client.conftest import connect, tokenizer

__all__ = ["connect", "tokenizer"]
