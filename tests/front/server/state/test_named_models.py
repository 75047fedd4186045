"""Names of served models: kept by owner, bounded, replaced, forgotten (BEY-43)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import Conflict, TooLarge
from headrace.front.server.state import named_models
from headrace.front.server.state.database import open_database
from headrace.front.server.state.named_models import MAX_BYTES, NamedModel, NamedModelStore


async def test_a_name_belongs_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_models, "MAX_NAMES", 2)
    database = open_database(f"sqlite:{tmp_path / 'names'}", folder=tmp_path)
    store = NamedModelStore(database, clock=iter(range(1, 9)).__next__)
    bob = NamedModel(name="bob", base="m", parameters={"seed": 5}, messages=({"role": "user"},))
    await store.put(bob, "one")
    assert await store.get("bob", "two") is None and await store.all("two") == []
    kept = await store.get("bob", "one")
    assert kept is not None and kept.changed_at == 1 and kept.parameters == {"seed": 5}
    await store.put(NamedModel(name="bob", base="other"), "one")
    await store.put(NamedModel(name="eve", base="m"), "one")
    assert [(one.name, one.base) for one in await store.all("one")] == [
        ("eve", "m"),
        ("bob", "other"),
    ]
    with pytest.raises(Conflict, match="2 are allowed"):
        await store.put(NamedModel(name="zoe", base="m"), "one")
    with pytest.raises(TooLarge):
        await store.put(NamedModel(name="bob", base="m", system="x" * MAX_BYTES), "one")
    assert not await store.delete("bob", "two") and await store.delete("bob", "one")
    assert await store.get("bob", "one") is None
    await database.close()
