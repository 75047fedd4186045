"""Texts to read, and pictures of them: any font, size 16 to 64, any colour on a light ground."""
# ruff: noqa: SIM905 - word lists read best as text

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from demo.sees.item import Showing, Turn, is_held_out
from demo.tasks import words

MOST_PIXELS = 1 << 16
"""Of a picture: 256 * 256."""
SIZES = (16, 64)
QUESTIONS = (
    "What does the image say?", "What does the picture say?", "Read the text.", "What is written here?",
    "What does it say?", "Read this.", "What text is in the image?", "What is written in the image?",
    "What do you read?", "What does this image say?", "Please read the image.", "What is the text?",
    "Transcribe the text.", "What text do you see?", "Can you read this?", "Read the text in the image.",
)  # fmt: skip
WORD_QUESTIONS = (
    "Which word is this?", "What word is shown?", "Which word do you see?", "What is the word?",
    "Which word is in the image?",
)  # fmt: skip
NUMBER_QUESTIONS = (
    "Which number is this?", "What number is shown?", "Which number do you see?", "What is the number?",
    "Read the number.", "What number does the image show?",
)  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SIGNS = ".,:;!?-+/%$#&()'\"=@*"
_SYLLABLES = (
    "an ar be ca co de di do en er fa fi ga ge ha he in is ka ki la le li lo ma me mi mo na ne ni no or pa pe po qu ra "
    "re ri ro sa se si so sta te ti to tra tu un va ve vi vo wa we xa ya yo za ze bl br ch cl cr dr fl fr gl gr pl pr "
    "sh sl sn sp st th tr tw wh ing ion er est ly ness ment able"
).split()
_WORDS = [
    *words.NAMES, *words.ANIMALS, *words.FRUITS, *words.COLORS, *words.OBJECTS, *words.ADJECTIVES, *words.VERBS,
    *words.CITIES, *words.CAPITALS,
    *"the and of to in is it you that he was for on are with as his they at be this have from or one had by word but "
     "not what all were we when your can said there use each which she do how their if will up other about out many "
     "then them these so some her would make like him into time has look two more write go see number no way could "
     "people my than first water been call who its now find long down day did get come made may part hello world "
     "welcome open closed exit enter stop danger caution push pull sale free new menu coffee tea price total thank "
     "thanks please help error warning ready done start pause left right north south east west street station "
     "airport hotel room floor office school library museum market bakery pharmacy hospital police "
     "monday tuesday wednesday thursday friday saturday sunday january february march april june july august "
     "september october november december headrace engine model token server vision".split(),
]  # fmt: skip


def number(rng: Random) -> str:
    """A number as people write them."""
    kind = rng.random()
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 8)))
    plain = digits.lstrip("0") or "0"
    if kind < 0.55:
        return plain
    if kind < 0.65:
        return f"{rng.randint(0, 999)}.{rng.randint(0, 99):02}"
    if kind < 0.72:
        return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    if kind < 0.78:
        return f"{rng.randint(1, 999)},{rng.randint(0, 999):03}"
    if kind < 0.84:
        return f"{rng.randint(1, 31)}.{rng.randint(1, 12)}.{rng.randint(1900, 2099)}"
    if kind < 0.9:
        return f"{rng.randint(1900, 2099)}-{rng.randint(1, 12):02}-{rng.randint(1, 31):02}"
    if kind < 0.95:
        return f"{rng.choice('$-+#')}{plain}"
    return f"{rng.randint(0, 100)}%"


def word(rng: Random) -> str:
    """A known word, or one that is made up; lower case, a capital first, or capitals."""
    kind = rng.random()
    if kind < 0.5:
        found = rng.choice(_WORDS)
    elif kind < 0.8:
        found = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4)))
    else:
        found = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 9)))
    case = rng.random()
    if case < 0.3:
        found = found[0].upper() + found[1:]
    elif case < 0.5:
        found = found.upper()
    return found


def line(rng: Random, most: int, signs_share: float = 0.12) -> str:
    """A few words and numbers of at most `most` characters, or, in `signs_share` of all cases, signs at random."""
    kind = rng.random()
    if kind < signs_share:
        signs = _LETTERS + _LETTERS.upper() + "0123456789" * 3 + _SIGNS
        parts = ["".join(rng.choice(signs) for _ in range(rng.randint(2, 8)))]
    else:
        count = rng.choice((1, 1, 1, 2, 2, 3, 4))
        parts = [word(rng) if rng.random() < 0.7 else number(rng) for _ in range(count)]
    found = " ".join(parts)
    if rng.random() < 0.12:
        found += rng.choice("!?.,:")
    while len(found) > most and " " in found:
        found = found.rpartition(" ")[0]
    return found[:most].strip()


def light(rng: Random, least: int = 190) -> tuple[int, int, int]:
    """A light colour, of which no part is below `least`; white most often."""
    if rng.random() < 0.4:
        return (255, 255, 255)
    floor = rng.randint(least, 250)
    return (rng.randint(floor, 255), rng.randint(floor, 255), rng.randint(floor, 255))


def ink(rng: Random, ground: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black, or any colour that can be told from the ground."""
    if rng.random() < 0.35:
        return (0, 0, 0)
    while True:
        colour = (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
        if _brightness(ground) - _brightness(colour) > 70:
            return colour


def _brightness(colour: tuple[int, int, int]) -> float:
    return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]


class Fonts:
    """The font files of a folder, and Pillow's own."""

    def __init__(self, folder: Path) -> None:
        self.files = [None, *sorted(map(str, folder.glob("*.[to]tf")))]
        assert len(self.files) > 1, folder

    def any(self, rng: Random, size: int) -> ImageFont.FreeTypeFont:
        """One of them."""
        file = rng.choice(self.files)
        return _font(file, size)


@lru_cache(maxsize=2048)
def _font(file: str | None, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


def picture_of(rng: Random, text: str, font: ImageFont.FreeTypeFont) -> Image.Image | None:
    """The text somewhere on a ground that is a little or much larger; None if it does not fit."""
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    spacing = rng.randint(2, 2 + font.size // 3)
    left, top, right, bottom = probe.multiline_textbbox((0, 0), text, font=font, spacing=spacing)
    wide, high = int(right - left) + 1, int(bottom - top) + 1
    margin = rng.randint(2, 12)
    width, height = wide + 2 * margin, high + 2 * margin
    if rng.random() < 0.6:
        width += int(rng.random() ** 2 * 160)
        height += int(rng.random() ** 2 * 120)
    if rng.random() < 0.08:
        width, height = max(width, 256), max(height, 256)
    width, height = max(width, 24), max(height, 24)
    if width * height > MOST_PIXELS:
        return None
    ground = light(rng)
    picture = Image.new("RGB", (width, height), ground)
    at = (
        (
            rng.randint(margin, width - wide - margin) - left,
            rng.randint(margin, height - high - margin) - top,
        )
        if width >= wide + 2 * margin and height >= high + 2 * margin
        else (margin - left, margin - top)
    )
    draw = ImageDraw.Draw(picture)
    align = rng.choice(("left", "left", "center"))
    draw.multiline_text(at, text, fill=ink(rng, ground), font=font, spacing=spacing, align=align)
    return picture


def reading(rng: Random, fonts: Fonts, *, held_out: bool = False) -> Showing:
    """A picture of a text, and what it says."""
    while True:
        kind = rng.random()
        size = round(SIZES[0] * (SIZES[1] / SIZES[0]) ** rng.random())
        if kind < 0.18:
            text, task, questions = number(rng), "read_number", (*NUMBER_QUESTIONS, *QUESTIONS[:8])
        elif kind < 0.42:
            text, task, questions = word(rng), "read_word", (*WORD_QUESTIONS, *QUESTIONS[:8])
        else:
            lines = rng.choice((1, 1, 2, 2, 3, 3))
            text = "\n".join(line(rng, 26) for _ in range(lines))
            task, questions = "read_line" if lines == 1 else "read_lines", QUESTIONS
        if not text.strip() or is_held_out(text) is not held_out:
            continue
        picture = picture_of(rng, text, fonts.any(rng, size))
        if picture is not None:
            break
    turn = Turn(task=task, question=rng.choice(questions), answer=text)
    return Showing(media=(picture,), turns=(turn,))


def reading_lines(rng: Random, fonts: Fonts) -> Showing:
    """Two or three lines for training, small enough to fit more often than chance would have it; a third of them
    signs at random, which no knowledge of words helps to read."""
    while True:
        size = round(SIZES[0] * 2.2 ** rng.random())
        text = "\n".join(line(rng, 26, signs_share=0.33) for _ in range(rng.choice((2, 3))))
        if not text.strip() or is_held_out(text):
            continue
        picture = picture_of(rng, text, fonts.any(rng, size))
        if picture is not None:
            turn = Turn(task="read_lines", question=rng.choice(QUESTIONS), answer=text)
            return Showing(media=(picture,), turns=(turn,))
