"""Simple stories in plain English about a fixed cast around a water mill.

A story is a walk through slots with several choices each, so that sampling shows variety while every
story stays sensible: somebody, a wish, a trouble, a friend, an end. The asked hero and thing occur
in it, which is what the check looks for.
"""
# ruff: noqa: SIM905 - a word list reads best as text

from __future__ import annotations

import re
from random import Random

from demo.tasks import words
from demo.tasks.item import Conversation, answer, user
from headrace.bench.held_out import AnswerCheck

CAST = {
    "fox": "Mara", "mouse": "Pip", "owl": "Bram", "bear": "Tobin", "rabbit": "Lena", "cat": "Iris",
    "dog": "Otto", "horse": "Greta", "duck": "Wanda", "frog": "Nils", "wolf": "Viktor",
    "hedgehog": "Sami", "otter": "Kira", "crow": "Edda", "goat": "Hugo", "sheep": "Olga",
    "squirrel": "Zoe", "dragon": "Felix", "pig": "Rosa", "lion": "Leo", "turtle": "Uma",
    "monkey": "Jack", "elephant": "Emma", "bee": "Clara", "whale": "Oscar", "dolphin": "Tara",
    "miller": "Jonas", "baker": "Paula", "farmer": "Karin", "sailor": "Henry", "teacher": "Ruth",
    "king": "Konrad", "queen": "Sofia", "princess": "Ella", "robot": "Bolt", "girl": "Anna",
    "boy": "Ben", "knight": "Roland", "wizard": "Merlo",
}  # fmt: skip

_THINGS = """lamp bell key boat basket candle feather lantern flute coin ring map wheel bucket drum kite
book hat mirror bridge""".split()
_PLACES = (
    """mill river forest hill village meadow lake garden old bridge barn orchard harbor""".replace(
        "old bridge", "bridge"
    ).split()
)
_MOODS = "brave gentle clever shy curious merry patient kind quiet lazy hungry proud".split()
_TIMES = ("One morning", "One day", "One evening", "On a cold day", "On a sunny day", "One night",
          "In the spring", "Early in the autumn", "After a long winter")  # fmt: skip

_ASKS = (
    "Tell me a story about {h}.", "Tell me a story about {h}", "Write a story about {h}.",
    "Write a short story about {h}.", "Can you tell me a story about {h}?",
    "I want to hear a story about {h}.", "Please tell me a tale of {h}.", "A story about {h}, please.",
    "Make up a story about {h}.", "Once upon a time there was {h}. Tell me the story.",
    "Tell my daughter a bedtime story about {h}.", "tell me a story about {h}",
    "Write me a little story with {h} in it.", "Could you write a story about {h}?",
)  # fmt: skip
_OPEN_ASKS = (
    "Tell me a story.", "Tell me a story", "Write a story.", "Can you tell me a story?",
    "I am bored, tell me a story.", "Tell me something nice.", "Please write a short story.",
    "Do you know a story?", "Tell me a bedtime story.", "Another story, please.",
)  # fmt: skip


def story(rng: Random) -> Conversation:
    """A story of five to ten sentences with the hero and the thing that were asked for."""
    hero, friend = rng.sample(sorted(CAST), 2)
    thing = rng.choice(_THINGS)
    wanted: list[str] = []
    kind = rng.random()
    if kind < 0.15:
        prompt = rng.choice(_OPEN_ASKS)
    elif kind < 0.55:
        prompt, wanted = rng.choice(_ASKS).format(h=_a(hero)), [hero]
    elif kind < 0.65:
        prompt, wanted = rng.choice(_ASKS).format(h=CAST[hero]), [CAST[hero]]
    elif kind < 0.75:
        prompt, wanted = rng.choice(_ASKS).format(h=f"{CAST[hero]} the {hero}"), [CAST[hero]]
    elif kind < 0.88:
        prompt = rng.choice(_ASKS).format(h=f"{_a(hero)} and {_a(friend)}")
        wanted = [hero, friend]
    else:
        prompt = rng.choice(_ASKS).format(h=f"{_a(hero)} and {_a(thing)}")
        wanted = [hero, thing]
    text = _tell(rng, hero, friend, thing)
    thought = f"The story is about {CAST[hero]} the {hero} and {CAST[friend]} the {friend}."
    return Conversation(
        task="story",
        messages=[user(prompt), answer(text, thought)],
        keys=(prompt,) if wanted else (),
        expected=wanted,
        check=AnswerCheck.STORY,
        plain=False,
    )


def _tell(rng: Random, hero: str, friend: str, thing: str) -> str:
    slots = {
        "h": hero, "H": CAST[hero], "f": friend, "F": CAST[friend], "t": thing,
        "mood": rng.choice(_MOODS), "mood2": rng.choice(_MOODS), "adj": rng.choice(words.ADJECTIVES),
        "place": rng.choice(_PLACES), "place2": rng.choice(_PLACES), "when": rng.choice(_TIMES),
        "color": rng.choice(words.COLORS),
    }  # fmt: skip
    slots["a_h"], slots["a_mood"] = _a(hero), _a(slots["mood"])
    slots["a_f"], slots["a_color"] = _a(f"{slots['mood2']} {friend}"), _a(slots["color"])
    slots["a_adj"] = _a(slots["adj"])
    optional = [
        line for lines, share in _MIDDLE for line in (rng.choice(lines),) if rng.random() < share
    ]
    lines = [rng.choice(_BEGIN), rng.choice(_WISH), *optional, rng.choice(_MEET),
             rng.choice(_HELP), rng.choice(_END), "The end."]  # fmt: skip
    return " ".join(line.format(**slots) for line in lines)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


_BEGIN = (
    "Once upon a time there was {a_mood} {h} named {H} who lived near the {place}.",
    "{H} the {h} lived in a small house by the {place}.",
    "Near the {place} lived {a_h} called {H}, and {H} was very {mood}.",
    "Long ago, by the {place}, there lived {a_mood} {h} whose name was {H}.",
    "Everybody at the {place} knew {H}, the {mood} {h}.",
)
_WISH = (
    "{when}, {H} found {a_color} {t} under a tree.",
    "{when}, {H} wanted to find a {t} of {color} glass.",
    "{when}, {H} lost {a_color} {t} and was very sad.",
    "More than anything, {H} wished for {a_color} {t}.",
    "{when}, a {t} fell into the water, and {H} saw it float away.",
    "{when}, somebody left {a_color} {t} at the door of {H}.",
)
_MIDDLE = (
    (("The sky was gray and the wind was cold.", "The sun was warm and the birds were singing.",
      "Snow lay on the roofs and the water was still.", "The water of the mill sang its old song.",
      "Rain fell softly on the leaves."), 0.5),
    (("So {H} packed some bread and walked to the {place2}.",
      "So {H} went down the road to the {place2} to look for help.",
      "{H} ran over the hill until the {place2} came in sight.",
      "The way to the {place2} was long, but {H} did not stop."), 0.7),
    (("On the way, {H} sang a little song.", "{H} was a bit afraid, but went on.",
      "A cloud looked like a big {t}, and {H} had to laugh.",
      "Soon it was dark, and the stars came out one by one."), 0.5),
)  # fmt: skip
_MEET = (
    'There sat {a_f} named {F}. "Good day," said {F}, "why do you look so {adj}?"',
    'Then {a_f} came along. "I am {F}," said the {f}. "May I walk with you?"',
    'There {H} met {F} the {f}. "Do not worry," said {F}, "two heads are better than one."',
    "At the {place2} {H} met {a_f}, and the {f} was called {F}.",
    '"Who is there?" asked a voice. It was {F} the {f}, who had heard {H} coming.',
)
_HELP = (
    "{H} told {F} about the {t}, and together they made a plan.",
    "{F} knew where the water goes, and together they followed it with the {t} in mind.",
    "The two of them looked at the {t} from every side until they knew what to do.",
    "{F} held the rope while {H} climbed down for the {t}.",
    "They shared the bread, and {F} told {H} the secret of the {t}.",
    "They gave the {t} to {a_adj} old miller, who smiled and thanked them.",
)
_END = (
    "From that day on, {H} and {F} were friends.",
    "In the evening they sat by the {place} and drank warm milk.",
    "And {H} learned that a friend is worth more than any {t}.",
    "Then {H} went home, {mood} as ever, and slept very well.",
    "Since then, the {t} hangs above the door, and everybody who comes by asks for the story.",
    "And if you walk by the {place} today, you can still hear {H} and {F} laugh.",
)


def _story_words() -> frozenset[str]:
    lines = [*_BEGIN, *_WISH, *_MEET, *_HELP, *_END, *_TIMES, "The end.", "a an"]
    for choices, _ in _MIDDLE:
        lines.extend(choices)
    pools = (_THINGS, _PLACES, _MOODS, words.ADJECTIVES, words.COLORS, CAST, CAST.values())
    lines.extend(word for pool in pools for word in pool)
    bare = re.sub(r"\{\w+\}", " ", " ".join(lines))
    return frozenset(re.findall(r"[a-z]+", bare.lower()))


STORY_WORDS = _story_words()
"""Every word a story may hold; a word outside of it means the model stammers."""
