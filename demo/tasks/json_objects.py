"""JSON by instruction: objects and lists from named values, pairs or a sentence about a person."""
# ruff: noqa: SIM905 - a word list reads best as text

from __future__ import annotations

import json
from random import Random

from demo.tasks import words
from demo.tasks.item import Conversation, answer, user
from demo.tasks.lists import code
from headrace.bench.held_out import AnswerCheck

_OPENERS = (
    "Give me a JSON object with", "Write a JSON object with", "Make a JSON object with",
    "Return JSON with", "Create a JSON object with", "Output a JSON object with",
    "I need a JSON object with", "Please produce JSON with", "Reply with a JSON object with",
    "Respond in JSON with", "Build JSON with",
)  # fmt: skip
_PAIR_ASKS = (
    "Convert to JSON: {p}", "Turn this into JSON: {p}", "Make JSON from this: {p}",
    "{p}\nWrite this as a JSON object.", "Write these pairs as JSON: {p}", "As JSON: {p}",
    "Convert these values to a JSON object: {p}",
)  # fmt: skip
_LIST_ASKS = (
    "Write this list as a JSON array: {l}", "Make a JSON list of: {l}", "As a JSON array: {l}",
    "Convert this list to JSON: {l}", "Give me a JSON array with these items: {l}",
)  # fmt: skip
_EXTRACT_ASKS = (
    "{s}\nReturn JSON with the keys {k}.", "{s} Give me a JSON object with the keys {k}.",
    "Extract {k} as JSON: {s}", "Read this: {s}\nAnswer with a JSON object with keys {k}.",
    "From this text extract the fields {k} as JSON.\n{s}",
)  # fmt: skip

_FIELDS = (
    "name age city color animal fruit job size count price active open day month language room id "
    "title level score done key value user year weight owner kind label"
).split()


def json_object(rng: Random) -> Conversation:
    """A JSON object or array that holds exactly the given values."""
    kind = rng.random()
    if kind < 0.4:
        prompt, value = _worded(rng)
    elif kind < 0.6:
        prompt, value = _pairs(rng)
    elif kind < 0.7:
        items = rng.sample(words.EVERY_NOUN, rng.randint(2, 8))
        listed: list[object] = list(items)
        if rng.random() < 0.4:
            listed = [rng.randrange(1000) for _ in items]
        prompt = rng.choice(_LIST_ASKS).format(l=", ".join(str(item) for item in listed))
        value = listed
    else:
        prompt, value = _extracted(rng)
    if rng.random() < 0.1:
        prompt += " " + rng.choice(("Only JSON, please.", "No other text.", "JSON only."))
    message = answer(json.dumps(value, ensure_ascii=False), "I write the values as JSON.")
    return Conversation(
        task="json",
        messages=[user(prompt), message],
        keys=(prompt,),
        expected=value,
        check=AnswerCheck.JSON,
        plain=False,
    )


def field_value(rng: Random, name: str) -> object:
    """A value that suits the field's name."""
    if name in ("age", "count", "size", "level", "score", "weight", "id"):
        return rng.randrange(100) if rng.random() < 0.8 else rng.randrange(10000)
    if name == "year":
        return rng.randint(1900, 2030)
    if name == "price":
        return rng.randrange(100) + rng.choice((0.25, 0.5, 0.75, 0.99))
    if name in ("active", "open", "done"):
        return rng.random() < 0.5
    pools: dict[str, list[str] | tuple[str, ...]] = {
        "name": words.NAMES, "owner": words.NAMES, "user": words.NAMES, "city": words.CITIES,
        "color": words.COLORS, "animal": words.ANIMALS, "fruit": words.FRUITS, "job": words.JOBS,
        "day": words.DAYS, "month": words.MONTHS, "language": words.LANGUAGES,
        "room": words.ROOMS, "title": words.SONGS,
    }  # fmt: skip
    if name in ("key", "label"):
        return rng.choice(words.LETTERS) + code(rng, rng.randint(2, 7))
    return rng.choice(pools.get(name, words.EVERY_WORD))


def _draw_fields(rng: Random, most: int) -> dict[str, object]:
    names = rng.sample(_FIELDS, rng.randint(1, most))
    return {name: field_value(rng, name) for name in names}


def _shown(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _worded(rng: Random) -> tuple[str, object]:
    fields = _draw_fields(rng, 5)
    form = rng.choice(("{k} {v}", "{k} {v}", "{k}={v}", "{k} set to {v}", '"{k}" {v}', "{k}: {v}"))
    parts = [form.format(k=name, v=_shown(value)) for name, value in fields.items()]
    value: dict[str, object] = dict(fields)
    if rng.random() < 0.2:
        items = rng.sample(words.FRUITS, rng.randint(2, 4))
        parts.append("a list items with " + ", ".join(items))
        value["items"] = items
        return f"{rng.choice(_OPENERS)} {'; '.join(parts)}.", value
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{rng.choice(_OPENERS)} {listed}.", value


def _pairs(rng: Random) -> tuple[str, object]:
    fields = _draw_fields(rng, 6)
    form, gap = rng.choice((("{k}={v}", "; "), ("{k}: {v}", ", "), ("{k} = {v}", "\n"),
                            ("{k}: {v}", "\n"), ("{k}={v}", " ")))  # fmt: skip
    if gap == " " and any(" " in str(value) for value in fields.values()):
        gap = "; "
    pairs = gap.join(form.format(k=name, v=_shown(value)) for name, value in fields.items())
    if "\n" in gap:
        pairs = "\n" + pairs
    return rng.choice(_PAIR_ASKS).format(p=pairs), fields


def _extracted(rng: Random) -> tuple[str, object]:
    name, age, city = rng.choice(words.NAMES), rng.randint(5, 99), rng.choice(words.CITIES)
    job, animal = rng.choice(words.JOBS), rng.choice(words.ANIMALS)
    color, fruit = rng.choice(words.COLORS), rng.choice(words.FRUITS)
    facts: dict[str, tuple[object, str]] = {
        "age": (age, f"is {age} years old"),
        "city": (city, f"lives in {city}"),
        "job": (job, f"works as a {job}"),
        "animal": (animal, f"has a {animal}"),
        "color": (color, f"likes the color {color}"),
        "fruit": (fruit, f"likes to eat {fruit}"),
    }
    told = rng.sample(sorted(facts), rng.randint(2, 4))
    clauses = [facts[field][1] for field in told]
    sentence = f"{name} {', '.join(clauses[:-1])} and {clauses[-1]}."
    wanted = ["name", *rng.sample(told, rng.randint(1, len(told)))]
    if rng.random() < 0.4:
        rng.shuffle(wanted)
    value = {field: name if field == "name" else facts[field][0] for field in wanted}
    listed = f"{', '.join(wanted[:-1])} and {wanted[-1]}"
    return rng.choice(_EXTRACT_ASKS).format(s=sentence, k=listed), value
