"""The demo model's tasks: endless checkable conversations for training, and held-out items.

Everything is drawn from a seeded `random.Random`: the same seed gives the same items. A held-out
problem never occurs in `training_conversation`, whatever the seed (see `item.py` for the split).
`headrace eval` asks a frozen file of held-out items (demo/freeze_held_out.py).
"""

from demo.tasks.draw import (
    EVAL_TASKS,
    TASKS,
    generate_eval,
    training_conversation,
)
from demo.tasks.item import Conversation, Message, Tool

__all__ = [
    "EVAL_TASKS",
    "TASKS",
    "Conversation",
    "Message",
    "Tool",
    "generate_eval",
    "training_conversation",
]
