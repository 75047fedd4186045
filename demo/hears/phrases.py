"""What is said: digits, numbers, dates, times and short commands, in English and German; as written and as spoken."""
# ruff: noqa: SIM905 - word lists read best as text

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

HELD_OUT_SHARE = 8
KINDS = ("digits", "number", "date", "time", "command")
MONTHS = {
    "en": "January February March April May June July August September October November December".split(),
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split(),
}
DAYS = {
    "en": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "de": "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split(),
}
_DIGITS = {
    "en": "zero one two three four five six seven eight nine".split(),
    "de": "null eins zwei drei vier fünf sechs sieben acht neun".split(),
}
_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
_NAMES = (
    "Anna Ben Clara David Emma Felix Greta Jonas Lena Maria Noah Paul Sara Tom Oscar Julia".split()
)
_CITIES = "Berlin Paris London Rome Madrid Vienna Hamburg Oslo Munich Boston".split()
_STÄDTE = "Berlin Paris London Rom Madrid Wien Hamburg Oslo München Köln".split()


@dataclass(frozen=True, kw_only=True)
class Phrase:
    """One utterance. `written` is what is to be heard, `spoken` what is given to the voice."""

    language: str
    kind: str
    written: str
    spoken: str


def is_held_out(written: str) -> bool:
    """Whether a phrase of many (digits, numbers, dates, times) is kept for evaluation."""
    return zlib.crc32(written.encode()) % HELD_OUT_SHARE == 0


def phrase(rng: Random, language: str, *, held_out: bool = False, kind: str = "") -> Phrase:
    """Any phrase; commands are few, and are trained and asked alike."""
    while True:
        chosen = kind or rng.choice((*KINDS, "command", "command"))
        written, spoken = _MAKERS[chosen](rng, language)
        if chosen == "command" or is_held_out(written) is held_out:
            return Phrase(language=language, kind=chosen, written=written, spoken=spoken)


def _digits(rng: Random, language: str) -> tuple[str, str]:
    found = [rng.randint(0, 9) for _ in range(rng.randint(2, 7))]
    joint = rng.choice((" ", " ", ", "))
    return " ".join(map(str, found)), joint.join(_DIGITS[language][one] for one in found)


def _number(rng: Random, language: str) -> tuple[str, str]:
    value = str(rng.randrange(10 ** rng.randint(1, 4)))
    return value, value


def _date(rng: Random, language: str) -> tuple[str, str]:
    day, month, year = rng.randint(1, 28), rng.randrange(12), rng.randint(1950, 2049)
    name = MONTHS[language][month]
    kind = rng.random()
    weekday = rng.choice(DAYS[language])
    if language == "en":
        first, said = f"{name} {day}", f"{name} {_ordinal(day)}"
        if kind < 0.5:
            return f"{first}, {year}", f"{said}, {_year(year)}"
        return (first, said) if kind < 0.7 else (f"{weekday}, {first}", f"{weekday}, {said}")
    first, said = f"{day}. {name}", f"{_ordnung(day)} {name}"
    if kind < 0.5:
        return f"{first} {year}", f"{said} {_jahr(year)}"
    return (first, said) if kind < 0.7 else (f"{weekday}, {first}", f"{weekday}, {said}")


def _time(rng: Random, language: str) -> tuple[str, str]:
    hour, minute = (
        rng.randint(1, 23 if language == "de" else 12),
        rng.choice((0, 15, 30, 45, rng.randint(1, 59))),
    )
    if language == "en":
        said = (
            f"{hour} o'clock"
            if minute == 0
            else f"{hour} oh {minute}"
            if minute < 10
            else f"{hour} {minute}"
        )
        written = f"{hour} o'clock" if minute == 0 else f"{hour}:{minute:02}"
        lead = rng.choice(("It is ", "At ", ""))
        return f"{lead}{written}" + ("." if lead == "It is " else ""), f"{lead}{said}"
    said = f"{_stunde(hour)} Uhr" + (f" {minute}" if minute else "")
    written = f"{hour} Uhr" + (f" {minute}" if minute else "")
    lead = rng.choice(("Es ist ", "Um ", ""))
    return f"{lead}{written}" + ("." if lead == "Es ist " else ""), f"{lead}{said}"


def _stunde(hour: int) -> str:
    return "ein" if hour == 1 else str(hour)


def _ordinal(day: int) -> str:
    if day <= 20:
        return _ORDINALS[day - 1]
    return f"twenty {_ORDINALS[day - 21]}"


def _ordnung(day: int) -> str:
    first = {1: "erster", 3: "dritter", 7: "siebter", 8: "achter"}
    if day in first:
        return first[day]
    return f"{day}ter" if day < 20 else f"{day}ster"


def _year(year: int) -> str:
    if 2000 <= year <= 2009:
        return f"two thousand {_DIGITS['en'][year - 2000]}" if year > 2000 else "two thousand"
    low = year % 100
    tail = "hundred" if low == 0 else f"oh {low}" if low < 10 else str(low)
    return f"{year // 100} {tail}"


def _jahr(year: int) -> str:
    if year >= 2000:
        return str(year)
    return f"{year // 100} hundert {year % 100}" if year % 100 else f"{year // 100} hundert"


def _command(rng: Random, language: str) -> tuple[str, str]:
    written = rng.choice(_COMMANDS[language])
    number = str(rng.choice((2, 3, 5, 10, 15, 20, 30, 45)))
    city = rng.choice(_CITIES if language == "en" else _STÄDTE)
    things, rooms = _THINGS[language], _ROOMS[language]
    found = written.format(
        name=rng.choice(_NAMES), city=city, number=number, thing=rng.choice(things), room=rng.choice(rooms),
        day=rng.choice(DAYS[language]), switch=rng.choice(_SWITCHES[language]),
    )  # fmt: skip
    return found, found


_THINGS = {
    "en": ("light", "lamp", "heating", "radio", "television", "fan", "music", "coffee machine"),
    "de": (
        "das Licht",
        "die Lampe",
        "die Heizung",
        "das Radio",
        "den Fernseher",
        "die Musik",
        "die Kaffeemaschine",
    ),
}
_ROOMS = {
    "en": ("kitchen", "bedroom", "living room", "bathroom", "office", "garden", "garage"),
    "de": (
        "in der Küche",
        "im Schlafzimmer",
        "im Wohnzimmer",
        "im Bad",
        "im Büro",
        "im Garten",
        "in der Garage",
    ),
}
_SWITCHES = {"en": ("on", "off"), "de": ("ein", "aus")}
_COMMANDS = {
    "en": (
        "Turn {switch} the {thing}.", "Turn {switch} the {thing} in the {room}.", "Switch {switch} the {thing}.",
        "Set a timer for {number} minutes.", "Wake me up in {number} minutes.", "Call {name}.",
        "Send a message to {name}.",
        "What is the weather in {city}?", "What is the weather like today?", "Play some music.", "Play the next song.",
        "Open the window.", "Close the door.", "Open the door in the {room}.", "Stop.", "Yes.", "No.", "Hello.",
        "Good morning.", "Good night.", "Thank you.", "Please repeat that.", "What time is it?", "How are you?",
        "Remind me on {day}.", "Show me the way to {city}.", "Call {name} on {day}.", "Volume up.", "Volume down.",
        "Read my messages.", "Start the engine.", "Book a table for {number} people.", "Add milk to the list.",
        "Hello, {name}.", "Where is {name}?", "The train to {city} is late.",
    ),
    "de": (
        "Schalte {thing} {switch}.", "Schalte {thing} {room} {switch}.", "Stelle einen Timer auf {number} Minuten.",
        "Wecke mich in {number} Minuten.", "Rufe {name} an.", "Schicke {name} eine Nachricht.",
        "Wie ist das Wetter in {city}?",
        "Wie wird das Wetter heute?", "Spiele etwas Musik.", "Spiele das nächste Lied.", "Öffne das Fenster.",
        "Schließe die Tür.", "Stopp.", "Ja.", "Nein.", "Hallo.", "Guten Morgen.", "Gute Nacht.", "Danke.",
        "Vielen Dank.",
        "Bitte wiederhole das.", "Wie spät ist es?", "Wie geht es dir?", "Erinnere mich am {day}.",
        "Zeige mir den Weg nach {city}.", "Lauter.", "Leiser.", "Lies meine Nachrichten vor.", "Starte den Motor.",
        "Setze Milch auf die Liste.", "Hallo, {name}.", "Wo ist {name}?", "Der Zug nach {city} hat Verspätung.",
    ),
}  # fmt: skip
_MAKERS = {"digits": _digits, "number": _number, "date": _date, "time": _time, "command": _command}
