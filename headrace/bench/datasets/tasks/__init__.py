"""The tasks of the bundled model: endless checkable chats, held-out items and their scoring.

Used by the trainer in `demo/` and by `headrace eval`, hence pure Python without third-party imports.
Everything is drawn from a seeded `random.Random`: the same seed gives the same items. A held-out
item is never produced by `training_conversation`, whatever the seed (see `item.py` for the split).
"""

from headrace.bench.datasets.tasks.draw import (
    EVAL_TASKS,
    TASKS,
    generate_eval,
    training_conversation,
)
from headrace.bench.datasets.tasks.item import Check, Conversation, EvalItem, Message, Tool
from headrace.bench.datasets.tasks.scoring import score, score_tool_calls, visible_text

__all__ = [
    "EVAL_TASKS",
    "TASKS",
    "Check",
    "Conversation",
    "EvalItem",
    "Message",
    "Tool",
    "generate_eval",
    "score",
    "score_tool_calls",
    "training_conversation",
    "visible_text",
]
