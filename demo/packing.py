"""Rows of tokens for training: conversations rendered, tokenized and laid end to end.

Rows are filled by worker processes, one random stream each, and arrive as small numpy arrays through a
queue. A conversation never spans two rows; what does not fit waits for the next one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo.chat_format import pieces
from demo.tasks import Conversation, training_conversation

ROW_TOKENS = 8192
_BATCH = 192
_WAITING = 24
"""Conversations that a row may choose from: enough to fill it to about 99 %."""


class Rows(NamedTuple):
    """Packed rows: tokens, which of them are learnt, and the number of the document in its row."""

    tokens_BT: npt.NDArray[np.uint16]
    learnt_BT: npt.NDArray[np.bool_]
    document_BT: npt.NDArray[np.uint16]
    """Starts at 1; 0 is padding."""


Document = tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]


def documents(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> list[Document]:
    """Token ids and learnt flags of each conversation, tokenized in one call."""
    split = [pieces(conversation) for conversation in conversations]
    texts = [piece.text for chat in split for piece in chat]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    made: list[Document] = []
    for chat in split:
        ids: list[int] = []
        learnt: list[bool] = []
        for piece in chat:
            new = next(encodings).ids
            ids.extend(new)
            learnt.extend([piece.learnt] * len(new))
        made.append((np.array(ids, np.uint16), np.array(learnt, np.bool_)))
    return made


def pack(found: Sequence[Document], row_tokens: int) -> Rows:
    """The documents in as few rows as first-fit needs, in their order."""
    lengths: list[int] = []
    rows: list[list[Document]] = []
    for document in found:
        size = len(document[0])
        for at, length in enumerate(lengths):
            if length + size <= row_tokens:
                rows[at].append(document)
                lengths[at] += size
                break
        else:
            rows.append([document])
            lengths.append(size)
    stacked = [_row(row, row_tokens) for row in rows]
    return Rows(*(np.stack(parts) for parts in zip(*stacked, strict=True)))


def stream(
    tokenizer: Tokenizer,
    seed: str,
    row_tokens: int,
    *,
    longest: int | None = None,
    form: Callable[[Document], Document] = lambda document: document,
) -> Iterator[Rows]:
    """Endless single rows of training conversations, of at most `longest` tokens each, in this form."""
    most = min(row_tokens, longest or row_tokens)
    rng = Random(seed)
    waiting: list[Document] = []
    while True:
        row: list[Document] = []
        room = row_tokens
        while True:
            if len(waiting) < _WAITING:
                fresh = [training_conversation(rng) for _ in range(_BATCH)]
                waiting += [form(d) for d in documents(tokenizer, fresh) if len(d[0]) <= most]
            fitting = next((i for i, d in enumerate(waiting) if len(d[0]) <= room), None)
            if fitting is None:
                break
            document = waiting.pop(fitting)
            row.append(document)
            room -= len(document[0])
        yield Rows(*(part[None] for part in _row(row, row_tokens)))


def start_workers(
    tokenizer_file: Path, *, workers: int, rows: int, row_tokens: int, seed: int, depth: int
) -> Queue[Rows]:
    """Starts the processes that fill the queue with batches of `rows` rows until the parent ends."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Rows] = context.Queue(depth)
    for number in range(workers):
        name = f"headrace demo {seed} {number}"
        arguments = (queue, tokenizer_file, name, rows, row_tokens)
        context.Process(target=_work, args=arguments, daemon=True).start()
    return queue


def _work(queue: Queue[Rows], tokenizer_file: Path, seed: str, rows: int, row_tokens: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = stream(Tokenizer.from_file(str(tokenizer_file)), seed, row_tokens)
    while True:
        parts = [next(source) for _ in range(rows)]
        queue.put(Rows(*(np.concatenate(part) for part in zip(*parts, strict=True))))


def _row(found: Sequence[Document], row_tokens: int) -> tuple[npt.NDArray[np.generic], ...]:
    tokens = np.zeros(row_tokens, np.uint16)
    learnt = np.zeros(row_tokens, np.bool_)
    number = np.zeros(row_tokens, np.uint16)
    at = 0
    for count, (ids, flags) in enumerate(found, 1):
        tokens[at : at + len(ids)] = ids
        learnt[at : at + len(ids)] = flags
        number[at : at + len(ids)] = count
        at += len(ids)
    return tokens, learnt, number
