"""Tools of every kind as functions, and the answer's calls told again in the kind that the client sent.

Every route that takes a chat goes through here: what generates, what renders, what turns ids back into an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.front.client.events import Events
from headrace.front.server.conversation import Translated, told_as_sent
from headrace.front.server.openai.custom import customized, with_functions
from headrace.front.server.openai.legacy import SENT_AS, as_function_calls, with_tools
from headrace.front.server.openai.schema import ChatRequest


@dataclass(frozen=True, kw_only=True)
class Called:
    """A chat whose tools are functions. `said` names the fields as they were sent; `custom`: the custom tools."""

    request: ChatRequest
    said: Translated
    custom: frozenset[str]

    def told(self, events: Events) -> Events:
        """The events with their calls as the client knows them."""
        if self.request.functions:
            events = as_function_calls(told_as_sent(events, self.said))
        return customized(events, self.custom) if self.custom else events


def called(request: ChatRequest) -> Called:
    """The chat as one with functions alone; InvalidRequest for tools that are none."""
    made, custom = with_functions(with_tools(request))
    said = Translated(document={}, places=(), names=SENT_AS if request.functions else {})
    return Called(request=made, said=said, custom=custom)
