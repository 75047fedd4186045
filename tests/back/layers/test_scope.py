"""What the layers of a model leave behind while they are built."""

from __future__ import annotations

from headrace.back.layers.scope import Ledger
from headrace.base.config.resolved import Decision


def test_what_many_layers_come_to_is_told_once() -> None:
    ledger = Ledger()
    for chosen in ("long", "short", "long", "long"):
        ledger.note(Decision("model.rope", "auto", chosen, "a reason"))
    assert [decision.chosen for decision in ledger.decisions()] == ["long", "short"]
