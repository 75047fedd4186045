"""Tasks on given text: copying, sorting, counting, reversing and picking.

The text is random words, names, numbers, codes or characters of other scripts, so nothing here can
be learnt by heart; the key of a problem is its whole prompt.
"""

from __future__ import annotations

from random import Random

from demo.tasks import words
from demo.tasks.item import Conversation, answer, user

_COPY_ASKS = (
    "Repeat exactly: {t}", "Copy this text: {t}", "Copy this:\n{t}", "Repeat after me: {t}",
    "Echo: {t}", "Please repeat the following text:\n{t}", "Say this back to me: {t}",
    "Write exactly this and nothing else:\n{t}", "Copy the text below.\n\n{t}", "Repeat: {t}",
    "Please copy the following exactly.\n{t}", "Repeat the following words: {t}",
    "{t}\n\nRepeat the text above.", "Copy everything after the colon: {t}", "repeat {t}",
    "Say {t}", "Copy: {t}", "Please say exactly: {t}", "Echo this back:\n{t}",
    "Reproduce this text word for word:\n{t}", "Output the following: {t}",
)  # fmt: skip

_NUMBER_PHRASES = (
    "from smallest to largest", "in ascending order", "in increasing order", "",
)  # fmt: skip
_FALLING_PHRASES = ("from largest to smallest", "in descending order", "in decreasing order")
_WORD_PHRASES = ("alphabetically", "in alphabetical order", "from A to Z", "by the alphabet")
_SORT_ASKS = (
    "Sort {p}: {l}", "Sort these {k} {p}: {l}", "Put these {k} {p}: {l}", "{l}\nSort them {p}.",
    "Please sort the following {k} {p}: {l}", "Arrange {p}: {l}", "Order these {k} {p}: {l}",
    "Can you sort {l} {p}?", "Sort the list {l} {p}.", "Here are some {k}: {l}. Sort them {p}.",
)  # fmt: skip

_COUNT_ASKS = (
    "How many words are in this list: {l}", "Count the words: {l}", "How many items are here: {l}",
    "Count the items in this list: {l}", "How many things do I list here? {l}",
    "{l}\nHow many words are there?", "Count these: {l}", "How many items: {l}?",
)  # fmt: skip
_TIMES_ASKS = (
    'How many times does "{w}" occur in: {l}', "How often does {w} appear in this list: {l}",
    "Count the word {w}: {l}", 'Count how often "{w}" appears here: {l}', "{l}\nHow many {w}?",
    "How many times do you see the word {w} in: {l}", "How many times does {w} appear in {l}?",
)  # fmt: skip


def copy(rng: Random) -> Conversation:
    """Repeat a text exactly, from one word to some hundred tokens."""
    text = _copy_text(rng)
    if rng.random() < 0.15:
        text = text.lower() if rng.random() < 0.7 else text.rstrip(".")
    quoted = f'"{text}"' if '"' not in text and rng.random() < 0.2 else text
    prompt = rng.choice(_COPY_ASKS).replace("{t}", quoted)
    if rng.random() < 0.1:
        prompt += rng.choice((" ", "\n")) + "Do not add anything else."
        text_says = "Do not add anything else."
        if text.endswith(text_says):
            return copy(rng)
    message = answer(text, "I repeat the text as it is.")
    return Conversation(task="copy", messages=[user(prompt), message], keys=(prompt,))


def sort(rng: Random) -> Conversation:
    """Sort words by the alphabet or numbers by size."""
    size = rng.randint(3, 8)
    if rng.random() < 0.5:
        top = rng.choice((10, 100, 100, 1000))
        items = [str(n) for n in rng.sample(range(top), size)]
        falling = rng.random() < 0.35
        phrase = rng.choice(_FALLING_PHRASES if falling else _NUMBER_PHRASES)
        ordered = sorted(items, key=int, reverse=falling)
        kind = "numbers"
    else:
        pool = rng.choice((words.NAMES, words.FRUITS, words.ANIMALS, words.EVERY_NOUN))
        items, kind = rng.sample(pool, size), rng.choice(("words", "words", "items"))
        phrase, ordered = rng.choice(_WORD_PHRASES), sorted(items)
    gap = rng.choice((", ", ", ", " "))
    prompt = rng.choice(_SORT_ASKS).format(p=phrase, k=kind, l=gap.join(items))
    prompt = prompt.replace(" :", ":").replace(" .", ".").replace(" ?", "?")
    thought = f"The first is {ordered[0]}, the last is {ordered[-1]}."
    message = answer(gap.join(ordered), thought)
    return Conversation(task="sort", messages=[user(prompt), message], keys=(prompt,))


def count(rng: Random) -> Conversation:
    """Count the items of a list, or how often one word stands in it."""
    gap = rng.choice((", ", " "))
    if rng.random() < 0.45:
        items = [rng.choice(words.EVERY_NOUN) for _ in range(rng.randint(1, 15))]
        prompt = rng.choice(_COUNT_ASKS).format(l=gap.join(items))
        result = len(items)
    else:
        pool = rng.sample(words.EVERY_NOUN, rng.randint(2, 5))
        items = [rng.choice(pool) for _ in range(rng.randint(3, 20))]
        prompt = rng.choice(_TIMES_ASKS).format(w=pool[0], l=gap.join(items))
        items = [item for item in items if item == pool[0]]
        result = len(items)
    thought = " ".join(f"{item} {i}" for i, item in enumerate(items, 1)) or "It is not there."
    message = answer(str(result), thought)
    return Conversation(task="count", messages=[user(prompt), message], keys=(prompt,))


def reverse(rng: Random) -> Conversation:
    """Give a list back in reverse order, or with its words in capitals or without."""
    gap = rng.choice((", ", " "))
    items = rng.sample(words.EVERY_WORD, rng.randint(1, 8))
    listed = gap.join(items)
    if rng.random() < 0.5:
        asks: tuple[str, ...] = ("Reverse this list: {l}", "Write these words backwards, last word first: {l}",
                "Reverse the order of: {l}", "Give me this list in reverse: {l}")  # fmt: skip
        result = gap.join(reversed(items))
    elif rng.random() < 0.6:
        asks = ("Write in upper case: {l}", "Make this upper case: {l}", "Capitalize all: {l}",
                "Convert to uppercase: {l}", "Write this in capitals: {l}", "Say {l} in upper case.",
                "Say {l} in capital letters.", "Write {l} in upper case.")  # fmt: skip
        result = listed.upper()
    else:
        asks = ("Write in lower case: {l}", "Make this lowercase: {l}", "Convert to lowercase: {l}")
        result, listed = listed, listed.upper()
    prompt = rng.choice(asks).format(l=listed)
    message = answer(result, "I go through the words one by one.")
    return Conversation(task="reverse", messages=[user(prompt), message], keys=(prompt,))


def pick(rng: Random) -> Conversation:
    """Pick the first, last, n-th, largest or smallest of a list."""
    gap = rng.choice((", ", " "))
    if rng.random() < 0.5:
        numbers = rng.sample(range(rng.choice((10, 100, 1000))), rng.randint(3, 8))
        items = [str(n) for n in numbers]
        word = rng.choice(
            ("largest", "smallest", "biggest", "lowest", "highest", "maximum", "minimum")
        )
        result = (
            max(numbers) if word in ("largest", "biggest", "highest", "maximum") else min(numbers)
        )
        asks: tuple[str, ...] = ("What is the {w} of {l}?", "What is the {w} number in this list: {l}",
                "Which is the {w} number: {l}", "Find the {w}: {l}")  # fmt: skip
        text = str(result)
    else:
        items = rng.sample(words.EVERY_NOUN, rng.randint(3, 8))
        places = {"first": 0, "second": 1, "third": 2, "last": -1}
        word = rng.choice(list(places))
        asks = ("What is the {w} word in: {l}", "Give me the {w} item of this list: {l}",
                "What is the {w} item here? {l}", "Which word is the {w}: {l}")  # fmt: skip
        text = items[places[word]]
    prompt = rng.choice(asks).format(w=word, l=gap.join(items))
    message = answer(text, f"I look for the {word} one.")
    return Conversation(task="pick", messages=[user(prompt), message], keys=(prompt,))


def sequence(rng: Random) -> Conversation:
    """Count up or down, or list what everybody knows in its order."""
    kind = rng.random()
    a, b = rng.randint(0, 30), rng.randint(2, 20)
    if kind < 0.35:
        asks: tuple[str, ...] = ("Count from {a} to {b}.", "Count from {a} to {b}", "Count up from {a} to {b}.",
                "Write the numbers from {a} to {b}.", "List the numbers {a} to {b}.")  # fmt: skip
        prompt = rng.choice(asks).format(a=a, b=a + b)
        items = [str(n) for n in range(a, a + b + 1)]
    elif kind < 0.55:
        asks = ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.")
        prompt = rng.choice(asks).format(a=a + b, b=a)
        items = [str(n) for n in range(a + b, a - 1, -1)]
    elif kind < 0.7:
        asks = ("Count to {b}.", "Can you count to {b}?", "Count to {b}", "Please count to {b}.")
        prompt, items = rng.choice(asks).format(b=b), [str(n) for n in range(1, b + 1)]
    else:
        number = rng.randint(2, 7)
        names = ("zero", "one", "two", "three", "four", "five", "six", "seven")
        shown = str(number) if rng.random() < 0.4 else names[number]
        kinds = {"fruits": words.FRUITS, "animals": words.ANIMALS, "colors": words.COLORS,
                 "names": words.NAMES, "cities": words.CITIES, "languages": words.LANGUAGES}  # fmt: skip
        chosen = rng.choice(sorted(kinds))
        asks = ("List {n} {k}.", "Name {n} {k}.", "Give me {n} {k}.", "list {n} {k}",
                "Tell me {n} {k}.", "Can you name {n} {k}?", "I need {n} {k}.")  # fmt: skip
        prompt, items = rng.choice(asks).format(n=shown, k=chosen), kinds[chosen][:number]
    message = answer(", ".join(items), f"It ends with {items[-1]}.")
    return Conversation(task="sequence", messages=[user(prompt), message], keys=(prompt,))


def sentence(rng: Random) -> str:
    """A plain made-up sentence of the closed vocabulary."""
    pattern = rng.randrange(6)
    a, b = rng.choice(words.ADJECTIVES), rng.choice(words.ADJECTIVES)
    x, y = rng.choice(words.EVERY_NOUN), rng.choice(words.EVERY_NOUN)
    name, verb = rng.choice(words.NAMES), rng.choice(words.VERBS)
    place = rng.choice(words.CITIES)
    return (
        f"The {a} {x} stood beside the {b} {y}.",
        f"{name} wanted to {verb} with the {a} {x}.",
        f"In {place}, {name} found a {a} {x} and a {b} {y}.",
        f"Every morning the {x} would {verb} near the {y}.",
        f"{name} sold the {a} {x} to a {rng.choice(words.JOBS)} in {place}.",
        f"Nobody saw how the {x} could {verb} over the {a} {y}.",
    )[pattern]


def code(rng: Random, size: int) -> str:
    """A random code of small letters and digits."""
    return "".join(rng.choices(words.LETTERS + "0123456789", k=size))


def _copy_text(rng: Random) -> str:
    kind = rng.randrange(10)
    if kind == 0:
        return " ".join(rng.choices(words.EVERY_WORD, k=rng.randint(1, 40)))
    if kind == 1:
        return " ".join(sentence(rng) for _ in range(rng.randint(1, 5)))
    if kind == 2:
        return " ".join(code(rng, rng.randint(2, 10)) for _ in range(rng.randint(1, 8)))
    if kind == 3:
        return "".join(rng.choices("0123456789", k=rng.randint(2, 30)))
    if kind == 4:
        return "\n".join(rng.choices(words.EVERY_NOUN, k=rng.randint(2, 10)))
    if kind == 5:
        return " ".join(rng.choices(words.UNICODE, k=rng.randint(1, 10)))
    if kind == 6:
        return _mixed(rng)
    if kind == 7:
        return ", ".join(rng.sample(words.NAMES + words.CITIES, rng.randint(2, 12)))
    if kind == 8:
        pool = rng.choice(
            (words.LETTERS, words.LETTERS.upper(), words.LETTERS.upper() + "0123456789")
        )
        gap = rng.choice(("", " ", "-"))
        return gap.join(rng.choices(pool, k=rng.randint(2, 24)))
    return " ".join(_pseudo_word(rng) for _ in range(rng.randint(1, 10)))


def _mixed(rng: Random) -> str:
    parts = []
    for _ in range(rng.randint(2, 14)):
        part = rng.choice((
            rng.choice(words.EVERY_WORD), rng.choice(words.NAMES), str(rng.randrange(10000)),
            code(rng, rng.randint(2, 6)), rng.choice(words.UNICODE), _pseudo_word(rng),
            rng.choice(words.EVERY_WORD).upper(), rng.choice(words.EVERY_WORD).capitalize(),
            f"{rng.choice(words.EVERY_NOUN)}_{rng.choice(words.VERBS)}",
        ))  # fmt: skip
        parts.append(part + rng.choice(("", "", "", ",", ".", "!", ";", "?", ":")))
    return " ".join(parts)


def _pseudo_word(rng: Random) -> str:
    syllables = ("ba", "con", "der", "fi", "gra", "hol", "in", "jo", "ka", "lu", "men", "no",
                 "pre", "qua", "ri", "sto", "ter", "un", "ve", "wi", "ex", "ly", "zo", "tion",
                 "ing", "sch", "th", "ough", "ment", "able")  # fmt: skip
    word = "".join(rng.choices(syllables, k=rng.randint(1, 4)))
    return word.capitalize() if rng.random() < 0.2 else word
