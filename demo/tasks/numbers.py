"""Arithmetic: sums, differences and products, with and without working on paper.

Two-digit problems are answered at once; three-digit ones and products of two two-digit numbers are
worked out between `<think>` tags. A problem's key is the bare problem, so no wording of a held-out
sum is ever trained; only the table up to ten times ten is held out by wording, because everybody
should know all of it. A step in the reasoning of another problem may still be a held-out sum.
"""

from __future__ import annotations

from random import Random

from demo.tasks.item import Conversation, answer, user

_WORDED = {
    "+": ("plus", "What is the sum of {a} and {b}?", "Add {a} and {b}.", "Add {b} to {a}.",
          "I have {a} apples and get {b} more. How many apples do I have?"),
    "-": ("minus", "What is the difference of {a} and {b}?", "Subtract {b} from {a}.",
          "Take {b} away from {a}.",
          "I have {a} coins and lose {b}. How many coins are left?"),
    "*": ("times", "What is the product of {a} and {b}?", "Multiply {a} by {b}.",
          "Multiply {a} and {b}.",
          "There are {a} boxes with {b} coins each. How many coins are there?"),
}  # fmt: skip

_ASKS = (
    "What is {e}?", "What's {e}?", "what is {e}", "Compute {e}.", "Calculate {e}.", "{e} = ?",
    "{e}", "{e}=", "{e} =", "{e}?", "How much is {e}?", "Can you tell me what {e} is?",
    "Please calculate {e}.", "What does {e} equal?", "Work out {e}.", "Solve {e}.",
    "what's {e}?", "Tell me {e}.", "Hey, what is {e}?", "calculate {e}", "Evaluate {e}",
    "I need the result of {e}.", "Quick question: {e}?", "Do you know what {e} is?",
    "Give me the answer to {e}.", "What is {e}? Answer with the number only.",
)  # fmt: skip


def arithmetic(rng: Random) -> Conversation:
    """A sum or a difference of numbers below 100, answered at once."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if rng.random() < 0.85:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
    return _problem(rng, "arithmetic", a, rng.choice("+-"), b)


def multiply(rng: Random) -> Conversation:
    """A product of a one-digit and a one- or two-digit number, answered at once."""
    a, b = rng.randint(0, 10), rng.randint(0, 99)
    if rng.random() < 0.5:
        a, b = b, a
    return _problem(rng, "multiply", a, "*", b)


def arithmetic_3(rng: Random) -> Conversation:
    """A three-digit sum or difference, answered at once: it teaches the carry."""
    a, b = rng.randint(0, 999), rng.randint(0, 999)
    return _problem(rng, "arithmetic_3", a, rng.choice("+-"), b)


def think(rng: Random) -> Conversation:
    """A problem worked out digit by digit or part by part between `<think>` tags."""
    kind = rng.random()
    if kind < 0.4:
        a, b, sign = rng.randint(10, 9999), rng.randint(10, 9999), rng.choice("+-")
    elif kind < 0.8:
        a, b, sign = rng.randint(2, 99), rng.randint(10, 99), "*"
    else:
        return _sum_of_three(rng)
    return _problem(rng, "think", a, sign, b, thinking=True)


def compare(rng: Random) -> Conversation:
    """Which of two numbers is larger or smaller, or whether one is."""
    top = rng.choice((20, 100, 1000))
    a, b = rng.sample(range(top), 2)
    word = rng.choice(("larger", "smaller", "bigger", "greater", "less"))
    less = word in ("smaller", "less")
    if rng.random() < 0.5 or word == "less":
        question = rng.choice(("Is {a} {w} than {b}?", "Is the number {a} {w} than {b}?"))
        text = "Yes." if (a < b) == less else "No."
    else:
        asks = ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?")
        question = rng.choice(asks)
        text = str(min(a, b) if less else max(a, b))
    prompt = question.format(a=a, b=b, w=word)
    thought = f"{min(a, b)} < {max(a, b)}"
    return Conversation(
        task="compare", messages=[user(prompt), answer(text, thought)], keys=(prompt,)
    )


def _problem(
    rng: Random, task: str, a: int, sign: str, b: int, *, thinking: bool = False
) -> Conversation:
    low, high = (a, b) if sign == "-" else sorted((a, b))
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    prompt = _wording(rng, a, sign, b)
    known_table = sign == "*" and high <= 10
    return Conversation(
        task=task,
        messages=[user(prompt), answer(str(result), _working(a, sign, b))],
        keys=(prompt,) if known_table else (f"{low}{sign}{high}",),
        thinking=thinking,
    )


def _wording(rng: Random, a: int, sign: str, b: int) -> str:
    plain = rng.random()
    if plain < 0.25:
        template = rng.choice(_WORDED[sign][1:])
        if a < b and "lose" in template:
            template = "Subtract {b} from {a}."
        return template.format(a=a, b=b)
    if plain < 0.4:
        expression = f"{a} {_WORDED[sign][0]} {b}"
    else:
        shown = rng.choice("*×x") if sign == "*" else sign
        gap = "" if rng.random() < 0.3 and shown != "x" else " "
        expression = f"{a}{gap}{shown}{gap}{b}"
    return rng.choice(_ASKS).format(e=expression)


def _working(a: int, sign: str, b: int) -> str:
    if sign == "*":
        return _long_product(a, b)
    if sign == "+":
        return f"{a} + {b}\n" + "\n".join(_columns(a, b)) + f"\n{a} + {b} = {a + b}"
    if a >= b:
        return f"{a} - {b}\n" + "\n".join(_borrow_columns(a, b)) + f"\n{a} - {b} = {a - b}"
    swapped = "\n".join(_borrow_columns(b, a))
    return f"{a} < {b}, so it is -({b} - {a})\n{swapped}\n{a} - {b} = {a - b}"


def _columns(a: int, b: int) -> list[str]:
    lines, carry = [], 0
    while a or b or carry:
        x, y = a % 10, b % 10
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}")
        a, b, carry = a // 10, b // 10, total // 10
    return lines


def _borrow_columns(a: int, b: int) -> list[str]:
    lines, borrow = [], 0
    while a or b:
        x, y = a % 10, b % 10
        digit = x - y - borrow
        taken = int(digit < 0)
        shown = digit + 10 * taken
        lines.append(f"{x} - {y} - {borrow} = {digit}, write {shown}, borrow {taken}")
        a, b, borrow = a // 10, b // 10, taken
    return lines


def _long_product(a: int, b: int) -> str:
    tens, ones = b // 10 * 10, b % 10
    if a < 10 and b < 10:
        return f"{a} * {b} = {a * b}"
    if a < 10:
        parts = f"{a} * {tens} = {a * tens}\n{a} * {ones} = {a * ones}"
        return f"{parts}\n{a * tens} + {a * ones} = {a * b}"
    if b < 10:
        return _long_product(b, a)
    first, second = _long_product_part(a, b // 10, 10), _long_product_part(a, ones, 1)
    return f"{first}\n{second}\n{a * tens} + {a * ones} = {a * b}"


def _long_product_part(a: int, digit: int, scale: int) -> str:
    high, low = a // 10 * 10, a % 10
    line = f"{digit} * {high} = {digit * high}, {digit} * {low} = {digit * low}"
    return f"{line}, so {a} * {digit * scale} = {a * digit * scale}"


def _sum_of_three(rng: Random) -> Conversation:
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    asks = ("What is {e}?", "Compute {e}.", "{e} = ?", "Calculate {e}.")
    prompt = rng.choice(asks).format(e=f"{a} + {b} + {c}")
    thought = f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}"
    return Conversation(
        task="think",
        messages=[user(prompt), answer(str(a + b + c), thought)],
        keys=(prompt, f"{min(a, b)}+{max(a, b)}"),
        thinking=True,
    )
