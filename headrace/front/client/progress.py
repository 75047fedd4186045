"""A progress bar over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar(
    total: int, *, show: bool, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar over prompts with tokens per second; nothing if it is not wanted or nobody looks at a
    terminal.

    What it gives is called once per finished prompt, with its number of output tokens.
    """
    if not show:
        yield lambda tokens: None
        return
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = console or RichConsole(stderr=True)
    done = 0
    with Progress(
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("prompts", total=total, rate="")

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            rate = done / (bar.tasks[0].elapsed or 1e-9)
            bar.update(task, advance=1, rate=f"{rate:,.0f} tok/s")

        yield advance
