"""`headrace chat [MODEL]`: a chat in the terminal. /help lists the commands."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from rich.console import Console

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import RequestError
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.sampling_flags import add_sampling_flags, sampling_of
from headrace.cli.session import EngineSession, open_session
from headrace.front.client.chat_output import ChatOutput
from headrace.front.client.events import Delta, Ended
from headrace.front.text.parsing.engine import Content, Part, Reasoning

HELP = """/new      forget the conversation
/system T  start again with the system prompt T
/think     turn reasoning on or off, where the model has it
/stats     show tokens per second after each answer, or not
/quit      leave (also Ctrl-D)"""


class Chat:
    """One conversation."""

    def __init__(self, session: EngineSession, own: Any, console: Console) -> None:
        self._session = session
        self._own = own
        self._console = console
        self._thinking = own.think
        self._stats = False
        self._messages: list[dict[str, Any]] = []
        self._restart(own.system)

    def _restart(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def command(self, line: str) -> bool:
        """Obeys a line that begins with a slash; False ends the chat."""
        word, _, rest = line.partition(" ")
        if word in ("/quit", "/exit", "/q"):
            return False
        if word == "/new":
            self._restart(self._system)
        elif word == "/system":
            self._restart(rest or None)
        elif word == "/think":
            self._thinking = not self._thinking
            self._console.print(f"[dim]reasoning {'on' if self._thinking else 'off'}[/]")
        elif word == "/stats":
            self._stats = not self._stats
        else:
            self._console.print(HELP, markup=False)
        return True

    async def say(self, text: str) -> bool:
        """Sends a message and prints the answer as it comes; an interrupted answer is kept as far
        as it came. Whether there is one: the model may refuse the request."""
        self._messages.append({"role": "user", "content": text})
        begin, count, output = time.perf_counter(), 0, ChatOutput()
        try:
            ids = await self._session.template.render_async(
                self._messages, kwargs={"enable_thinking": True} if self._thinking else {}
            )
            params = sampling_of(self._own, self._session.resolved.text.generation_defaults)
            listener = self._session.listener
            parser = listener.parser(ids)
            events = self._session.engine.generate(listener.generation(ids, params))
            async with aclosing(events) as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        self._show(output, parser.push(event.text))
                    elif isinstance(event, Ended):
                        count = event.num_output
                        self._show(output, parser.finish())
        except RequestError as error:
            self._console.print(f"[red]{error.message}[/]")
            self._messages.pop()
            return False
        finally:
            self._console.print()
        self._messages.append(output.message())
        if self._stats:
            seconds = time.perf_counter() - begin
            self._console.print(f"[dim]{count} tokens, {count / seconds:.1f} tokens/s[/]")
        return True

    def _show(self, output: ChatOutput, parts: list[Part]) -> None:
        """Prints more of the answer; what the model only thinks is dim."""
        for part in parts:
            if isinstance(part, Reasoning | Content):
                if isinstance(part, Content) and output.reasoning and not output.content:
                    self._console.print("\n")
                style = "dim" if isinstance(part, Reasoning) else None
                self._console.out(part.text, end="", style=style, highlight=False)
            output.add([part])
        sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Chats until the end of input."""
    own, options = chat_line("headrace chat", "Chat in the terminal.").parse(argv)
    asyncio.run(chat(with_model(options, own.path), own))
    return 0


def chat_line(prog: str, description: str) -> CommandLine:
    """The command line of a chat."""
    groups = ("model", "kv", "scheduler", "device", "adapters")
    line = CommandLine(prog, description, groups=groups)
    add_model_argument(line)
    line.parser.add_argument("--system", help="system prompt")
    line.parser.add_argument(
        "--think", action="store_true", help="reasoning on, where the model has it"
    )
    add_sampling_flags(line, max_tokens=1024)
    return line


async def _read_line(console: Console) -> str | None:
    """The next line the user types; None at the end of input."""
    try:
        return await asyncio.to_thread(console.input, "[bold cyan]>[/] ")
    except EOFError:
        return None


async def answer_once(options: Options, own: Any, prompt: str) -> int:
    """Prints the answer to one prompt; the exit status."""
    async with open_session(options) as session:
        answered = await Chat(session, own, Console()).say(prompt)
    return 0 if answered else 1


async def chat(options: Options, own: Any) -> None:
    """Reads lines and answers them, until the end of input."""
    console = Console()
    async with open_session(options) as session:
        conversation = Chat(session, own, console)
        console.print(
            f"[dim]{session.resolved.engine.model.name}; /help for commands, Ctrl-D to leave[/]"
        )
        while (line := await _read_line(console)) is not None:
            if line.startswith("/"):
                if not conversation.command(line):
                    return
            elif line.strip():
                answer = asyncio.ensure_future(conversation.say(line))
                try:
                    await answer
                except asyncio.CancelledError:
                    answer.cancel()
                    console.print("[dim]stopped[/]")
