"""Scenes of coloured shapes: drawn, counted, named, placed, compared, and shown one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from PIL import Image, ImageDraw

from demo.sees.item import Clip, Showing, Turn
from demo.sees.texts import light

COLOURS = {
    "red": ((220, 30, 30), (255, 0, 0), (200, 20, 40)),
    "green": ((30, 150, 50), (0, 128, 0), (0, 200, 0), (40, 180, 90)),
    "blue": ((30, 60, 220), (0, 0, 255), (30, 110, 240), (20, 30, 160)),
    "yellow": ((245, 215, 40), (255, 255, 0), (240, 200, 20)),
    "orange": ((245, 140, 20), (255, 165, 0), (240, 120, 10)),
    "purple": ((130, 40, 170), (128, 0, 128), (110, 50, 200)),
    "pink": ((250, 130, 190), (255, 105, 180), (255, 150, 190)),
    "black": ((20, 20, 20), (0, 0, 0), (40, 40, 40)),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond")
NUMBERS = 9
"""At most so many shapes in a scene."""
PLACES = (
    ("top left", "top", "top right"), ("left", "center", "right"), ("bottom left", "bottom", "bottom right"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A shape: its middle and half its size as shares of the picture's shorter side."""

    shape: str
    colour: str
    x: float
    y: float
    half: float
    fill: tuple[int, int, int]
    turn: float = 0.0

    @property
    def name(self) -> str:
        """red circle"""
        return f"{self.colour} {self.shape}"


def thing(rng: Random, x: float, y: float, half: float) -> Thing:
    """Any shape in any colour."""
    colour = rng.choice(list(COLOURS))
    return Thing(
        shape=rng.choice(SHAPES), colour=colour, x=x, y=y, half=half, fill=_fill(rng, colour),
        turn=rng.uniform(-8, 8) if rng.random() < 0.3 else 0.0,
    )  # fmt: skip


def recoloured(rng: Random, one: Thing, colour: str) -> Thing:
    """The same in another colour."""
    return replace(one, colour=colour, fill=_fill(rng, colour))


def _fill(rng: Random, colour: str) -> tuple[int, int, int]:
    base = rng.choice(COLOURS[colour])
    red, green, blue = (min(255, max(0, part + rng.randint(-12, 12))) for part in base)
    return (red, green, blue)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Things on a ground."""

    width: int
    height: int
    ground: tuple[int, int, int]
    things: tuple[Thing, ...]


def drawn(scene: Scene, *, fine: int = 1) -> Image.Image:
    """The scene; `fine`: drawn so many times larger, for smooth edges."""
    size = (scene.width * fine, scene.height * fine)
    picture = Image.new("RGB", size, scene.ground)
    draw = ImageDraw.Draw(picture)
    side = min(size)
    for one in scene.things:
        x, y, half = one.x * size[0], one.y * size[1], one.half * side
        if one.shape == "circle":
            draw.ellipse((x - half, y - half, x + half, y + half), fill=one.fill)
        else:
            draw.polygon([(x + half * a, y + half * b) for a, b in _corners(one)], fill=one.fill)
    return (
        picture if fine == 1 else picture.resize((scene.width, scene.height), Image.Resampling.BOX)
    )


def _corners(one: Thing) -> list[tuple[float, float]]:
    if one.shape == "square":
        found = [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    elif one.shape == "triangle":
        found = [(0.0, -0.95), (0.95, 0.8), (-0.95, 0.8)]
    elif one.shape == "diamond":
        found = [(0.0, -1.0), (0.75, 0.0), (0.0, 1.0), (-0.75, 0.0)]
    else:
        points = [(math.radians(36 * i - 90), 1.05 if i % 2 == 0 else 0.45) for i in range(10)]
        found = [(r * math.cos(a), r * math.sin(a)) for a, r in points]
    cos, sin = math.cos(math.radians(one.turn)), math.sin(math.radians(one.turn))
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in found]


def _size(rng: Random, least: int = 80) -> tuple[int, int]:
    side = rng.choice(
        (96, 128, 160, 192, 224, 256, rng.randint(least, 256), rng.randint(least, 200))
    )
    if rng.random() < 0.6:
        return side, side
    return side, min(256, max(64, int(side * rng.uniform(0.6, 1.5))))


def scattered(rng: Random, count: int) -> Scene:
    """So many things that do not touch, in few colours and shapes, so that there is something to count."""
    width, height = _size(rng)
    side = min(width, height)
    few = rng.random() < 0.7
    colours = rng.sample(list(COLOURS), rng.randint(1, 3)) if few else list(COLOURS)
    shapes = rng.sample(SHAPES, rng.randint(1, 3)) if few else SHAPES
    things: list[Thing] = []
    most = min(0.2, 0.42 / math.sqrt(max(count, 1)))
    base = rng.uniform(max(0.055, 6.5 / side), max(most, 7.0 / side))
    tries = 0
    while len(things) < count and tries < 400:
        tries += 1
        half = base * rng.uniform(0.85, 1.15) if tries < 200 else max(0.05, base * 0.6)
        mx, my = half * side / width * 1.1, half * side / height * 1.1
        x, y = rng.uniform(mx, 1 - mx), rng.uniform(my, 1 - my)
        apart = all(
            math.hypot((x - o.x) * width, (y - o.y) * height) > (half + o.half) * side * 1.12 + 2
            for o in things
        )
        if apart:
            one = thing(rng, x, y, half)
            one = recoloured(rng, replace(one, shape=rng.choice(shapes)), rng.choice(colours))
            things.append(one)
    return Scene(width=width, height=height, ground=light(rng, 222), things=tuple(things))


def placed(rng: Random, count: int) -> tuple[Scene, list[str]]:
    """Things with names of their own in the nine places of a picture, and where each is."""
    width, height = _size(rng)
    side = min(width, height)
    cells = rng.sample([(r, c) for r in range(3) for c in range(3)], count)
    things: list[Thing] = []
    for row, column in cells:
        half = rng.uniform(max(0.07, 7 / side), 0.14)
        x, y = (
            (column + 0.5 + rng.uniform(-0.12, 0.12)) / 3,
            (row + 0.5 + rng.uniform(-0.12, 0.12)) / 3,
        )
        while True:
            one = thing(rng, x, y, half)
            if all(one.name != other.name for other in things):
                break
        things.append(one)
    scene = Scene(width=width, height=height, ground=light(rng, 222), things=tuple(things))
    return scene, [PLACES[row][column] for row, column in cells]


_PLURAL_COUNT = (
    "How many {} are there?", "How many {} are in the image?", "How many {} do you see?", "Count the {}.",
    "How many {} does the image show?", "How many {} can you see?", "What is the number of {}?",
)  # fmt: skip


def plural(name: str) -> str:
    """circles; also of a name with its colour"""
    return f"{name}s"


def count_turn(rng: Random, scene: Scene) -> Turn:
    """How many of a shape, a colour, both, or all."""
    kind, things = rng.random(), scene.things
    known = rng.choice(things) if things and rng.random() < 0.8 else thing(rng, 0, 0, 0)
    if kind < 0.45:
        name, count = plural(known.name), sum(o.name == known.name for o in things)
    elif kind < 0.65:
        name, count = plural(known.shape), sum(o.shape == known.shape for o in things)
    elif kind < 0.8:
        noun = rng.choice(("shapes", "things", "objects"))
        name, count = f"{known.colour} {noun}", sum(o.colour == known.colour for o in things)
    else:
        name, count = rng.choice(("shapes", "things", "objects", "figures")), len(things)
    return Turn(task="count", question=rng.choice(_PLURAL_COUNT).format(name), answer=str(count))


def place_turn(rng: Random, scene: Scene, places: list[str]) -> Turn:
    """Where something is, what is somewhere, or how two lie to each other."""
    kind = rng.random()
    number = rng.randrange(len(places))
    one, place = scene.things[number], places[number]
    if kind < 0.3:
        forms = (
            "Where is the {}?", "Where in the image is the {}?", "Where do you see the {}?",
            "In which part of the image is the {}?", "Where is the {} in the picture?",
        )  # fmt: skip
        return Turn(task="place", question=rng.choice(forms).format(one.name), answer=place)
    if kind < 0.5:
        spot = "in the " + place if place != "center" else "in the center"
        spot = spot if place not in ("top", "bottom", "left", "right") else f"at the {place}"
        forms = (
            "What is {}?",
            "What do you see {}?",
            "Which shape is {}?",
            "What is {} of the image?",
        )
        return Turn(
            task="name",
            question=rng.choice(forms).format(spot),
            answer=f"a {one.name}".replace("a orange", "an orange"),
        )
    if len(places) < 2 or kind > 0.92:
        return name_turn(rng, scene)
    other = rng.choice([o for o in scene.things if o is not one])
    across = abs(one.x - other.x) > 0.2
    down = abs(one.y - other.y) > 0.2
    relations = [
        *([("to the left of", one.x < other.x), ("to the right of", one.x > other.x),
           ("left of", one.x < other.x), ("right of", one.x > other.x)] if across else []),
        *([("above", one.y < other.y), ("below", one.y > other.y)] if down else []),
    ]  # fmt: skip
    relation, holds = rng.choice(relations)
    return Turn(
        task="relation",
        question=f"Is the {one.name} {relation} the {other.name}?",
        answer="yes" if holds else "no",
    )


def name_turn(rng: Random, scene: Scene) -> Turn:
    """The colour of the only thing of its shape, the shape of the only one of its colour, or both."""
    things = scene.things
    if len(things) == 1 and rng.random() < 0.6:
        forms = (
            "What is shown?",
            "What do you see?",
            "What is in the image?",
            "What is this?",
            "Describe the image.",
        )
        return Turn(
            task="name",
            question=rng.choice(forms),
            answer=f"a {things[0].name}".replace("a orange", "an orange"),
        )
    single = [o for o in things if sum(p.shape == o.shape for p in things) == 1]
    if single and rng.random() < 0.6:
        one = rng.choice(single)
        forms = (
            "What colour is the {}?",
            "What color is the {}?",
            "Which color does the {} have?",
            "Which colour is the {}?",
        )
        return Turn(task="name", question=rng.choice(forms).format(one.shape), answer=one.colour)
    single = [o for o in things if sum(p.colour == o.colour for p in things) == 1]
    if single:
        one = rng.choice(single)
        forms = ("Which shape is {}?", "What shape is {}?", "What is {} in the image?")
        return Turn(task="name", question=rng.choice(forms).format(one.colour), answer=one.shape)
    one = rng.choice(things) if rng.random() < 0.5 else thing(rng, 0, 0, 0)
    there = any(o.name == one.name for o in things)
    article = "an" if one.name[0] == "o" else "a"
    forms = ("Is there {} {}?", "Is there {} {} in the image?", "Do you see {} {}?")
    return Turn(
        task="name",
        question=rng.choice(forms).format(article, one.name),
        answer="yes" if there else "no",
    )


def counting(rng: Random) -> Showing:
    """A scattered scene and a few questions of number."""
    scene = scattered(rng, rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6)))
    turns = [count_turn(rng, scene) for _ in range(rng.randint(2, 5))]
    if scene.things and rng.random() < 0.4:
        turns.append(name_turn(rng, scene))
    return Showing(media=(drawn(scene, fine=rng.choice((1, 2, 3))),), turns=_unlike(turns))


def placing(rng: Random) -> Showing:
    """A scene of nine places and questions about them."""
    scene, places = placed(rng, rng.choice((1, 1, 2, 2, 3, 3, 4, 5)))
    turns = [place_turn(rng, scene, places) for _ in range(rng.randint(2, 5))]
    if rng.random() < 0.3:
        turns.append(count_turn(rng, scene))
    if len(places) == 1:
        turns.append(name_turn(rng, scene))
    rng.shuffle(turns)
    return Showing(media=(drawn(scene, fine=rng.choice((1, 2, 3))),), turns=_unlike(turns))


def relating(rng: Random) -> Showing:
    """For training: a scene of nine places and many questions of how two things lie to each other. An answer is one
    bit beside the dozens of characters of a text that is read, so that few such questions teach little."""
    scene, places = placed(rng, rng.choice((2, 3, 4, 5)))
    turns = [place_turn(rng, scene, places) for _ in range(24)]
    return Showing(
        media=(drawn(scene, fine=rng.choice((1, 2, 3))),),
        turns=_unlike([turn for turn in turns if turn.task == "relation"] or turns[:1]),
    )


def _unlike(turns: list[Turn]) -> tuple[Turn, ...]:
    return tuple({turn.question: turn for turn in turns}.values())


def comparing(rng: Random) -> Showing:
    """Two pictures that are alike, or differ in one thing; or of which one shows more."""
    first = scattered(rng, rng.randint(1, 6))
    small = rng.choice((96, 112, 128, 160))
    first = replace(first, width=small, height=small)
    if any(o.half < 6.5 / small for o in first.things):
        first = replace(
            first, things=tuple(replace(o, half=max(o.half, 6.5 / small)) for o in first.things)
        )
    if not _apart(first):
        return comparing(rng)
    fine = rng.choice((1, 2, 3))
    if rng.random() < 0.4:
        second = replace(scattered(rng, rng.randint(0, 6)), width=small, height=small)
        if second.things and not _apart(second):
            return comparing(rng)
        turns = (_more(rng, first, second),)
    else:
        what, second = _changed(rng, first)
        turns = _differences(rng, what)
    return Showing(media=(drawn(first, fine=fine), drawn(second, fine=fine)), turns=turns)


def _apart(scene: Scene) -> bool:
    things = scene.things
    return bool(things) and all(
        math.hypot(a.x - b.x, a.y - b.y) > (a.half + b.half) * 1.05
        for i, a in enumerate(things)
        for b in things[:i]
    )


def _changed(rng: Random, scene: Scene) -> tuple[str, Scene]:
    """What differs, and the other scene."""
    what = rng.choice(("nothing", "nothing", "colour", "shape", "number", "place"))
    things = list(scene.things)
    at = rng.randrange(len(things))
    one = things[at]
    if what == "colour":
        things[at] = recoloured(rng, one, rng.choice([c for c in COLOURS if c != one.colour]))
    elif what == "shape":
        things[at] = replace(one, shape=rng.choice([s for s in SHAPES if s != one.shape]))
    elif what == "number":
        del things[at]
    elif what == "place":
        for _ in range(50):
            moved = replace(
                one, x=rng.uniform(one.half, 1 - one.half), y=rng.uniform(one.half, 1 - one.half)
            )
            things[at] = moved
            if math.hypot(moved.x - one.x, moved.y - one.y) > 0.2 and _apart(
                replace(scene, things=tuple(things))
            ):
                break
        else:
            return "nothing", scene
    return what, replace(scene, things=tuple(things))


def _differences(rng: Random, what: str) -> tuple[Turn, ...]:
    same = (
        "Are the two images the same?",
        "Are the images the same?",
        "Are both images the same?",
        "Are these the same?",
    )
    other = (
        "Are the two images different?",
        "Do the two images differ?",
        "Are the images different?",
    )
    which = (
        "What is different?", "What differs?", "What is the difference?", "What has changed?",
        "What is the difference between the two images?",
    )  # fmt: skip
    equal = what == "nothing"
    turns = [
        Turn(task="compare", question=rng.choice(same), answer="yes" if equal else "no"),
        Turn(task="compare", question=rng.choice(other), answer="no" if equal else "yes"),
        Turn(task="compare", question=rng.choice(which), answer=what if equal else f"the {what}"),
    ]
    rng.shuffle(turns)
    return tuple(turns[: rng.randint(1, 3)])


def _more(rng: Random, first: Scene, second: Scene) -> Turn:
    name = rng.choice(
        (
            "shapes",
            "shapes",
            "things",
            *(plural(o.shape) for o in first.things),
            *(plural(o.name) for o in first.things),
        )
    )

    def count(scene: Scene) -> int:
        if name in ("shapes", "things"):
            return len(scene.things)
        return sum(name in (plural(o.shape), plural(o.name)) for o in scene.things)

    one, two = count(first), count(second)
    answer = "the first" if one > two else "the second" if two > one else "neither"
    forms = (
        "Which image has more {}?",
        "Which image shows more {}?",
        "Which picture has more {}?",
        "In which image are there more {}?",
    )
    return Turn(task="compare", question=rng.choice(forms).format(name), answer=answer)


def in_order(rng: Random) -> Showing:
    """A clip in which things appear one after the other, alone or to stay."""
    side = rng.choice((64, 80, 96, 128, 160))
    scene = Scene(width=side, height=side, ground=light(rng, 222), things=())
    stays = rng.random() < 0.35
    count = rng.randint(1, 4)
    cells = rng.sample([(r, c) for r in range(2) for c in range(2)], count)
    things: list[Thing] = []
    for row, column in cells:
        half = rng.uniform(0.13, 0.21) if stays else rng.uniform(0.13, 0.33)
        x, y = (
            ((column + 0.5) / 2, (row + 0.5) / 2)
            if stays
            else (rng.uniform(half, 1 - half), rng.uniform(half, 1 - half))
        )
        while True:
            one = thing(rng, x, y, half)
            if all(one.name != other.name for other in things):
                break
        things.append(one)
    rate = rng.choice((2.0, 4.0, 5.0, 8.0, 10.0, 15.0, 25.0, 30.0))
    fine = rng.choice((1, 2))
    frames: list[Image.Image] = []
    for number in range(count):
        shown = things[: number + 1] if stays else [things[number]]
        picture = drawn(replace(scene, things=tuple(shown)), fine=fine)
        frames += [picture] * max(2, round(rate * rng.choice((1.0, 1.0, 1.5, 2.0))))
    names = ", ".join(one.name for one in things)
    turns = [Turn(task="order", question=rng.choice(_ORDER), answer=names)]
    if count > 1:
        turns += [
            Turn(task="order", question="Which shape appears first?", answer=things[0].name),
            Turn(task="order", question=rng.choice(_LAST), answer=things[-1].name),
            Turn(task="order", question=rng.choice(_NUMBER), answer=str(count)),
        ]
    turns = [turns[0], *rng.sample(turns[1:], rng.randint(0, len(turns) - 1))]
    rng.shuffle(turns)
    return Showing(media=(Clip(frames=tuple(frames), rate=rate),), turns=tuple(turns))


_ORDER = (
    "In which order do the shapes appear?", "In what order do the shapes appear?", "Which shapes appear, in order?",
    "List the shapes in the order in which they appear.", "What appears, in order?", "Name the shapes in order.",
    "What is shown, one after the other?",
)  # fmt: skip
_LAST = ("Which shape appears last?", "What comes last?")
_NUMBER = ("How many shapes appear?", "How many shapes are shown?")
