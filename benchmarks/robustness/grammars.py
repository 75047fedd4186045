"""Generated grammars that cost as much as can be made to, beside eight streams of known text (security P12).

    python -m benchmarks.robustness.grammars --grammars 2000 --write

Regular expressions, EBNF, schemas, patterns inside them and forced tools' patterns, with huge counts, nested repeats,
unions of many branches, deep nesting and long constants. The run is that of fuzz.py, with these cases in place of its
own: no 5xx but 503 with Retry-After, no process of the server ended (those in which grammars are tried first are made
to be killed), every bystander's text is what it was without the attack. Between its waves come waves of the same
requests without their grammars: what bystanders wait beside these (`plain`) is not the grammars' doing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.robustness import fuzz
from benchmarks.robustness.hostile import Case
from benchmarks.robustness.serving import server

SLOWDOWN = 2.0
COUNTS = (3, 100, 10_000, 1_000_000, 2**31, 10**12)


def regex(rng: random.Random, depth: int = 0) -> str:
    """A regular expression of huge counts, repeats in repeats and unions."""
    match rng.randrange(7 if depth < 4 else 3):
        case 0:
            return rng.choice("ab.") + f"{{{rng.choice(COUNTS)}}}"
        case 1:
            return rng.choice(("[a-z]", r"\d", "é", "(a+)+b", "(a|aa)+$", r"\w*"))
        case 2:
            return f"a{{0,{rng.choice(COUNTS)}}}"
        case 3:
            return f"({regex(rng, depth + 1)}){{{rng.choice(COUNTS[:3])}}}"
        case 4:
            return f"({regex(rng, depth + 1)})+"
        case 5:
            branches = [regex(rng, 4) + str(i) for i in range(rng.choice((2, 20, 500)))]
            return f"({'|'.join(branches)})"
        case _:
            return regex(rng, depth + 1) + regex(rng, depth + 1)


def ebnf(rng: random.Random) -> str:
    """A grammar in llama.cpp's notation."""
    count = rng.choice(COUNTS)
    names = [f"r{i}" for i in range(rng.choice((2, 30, 300)))]
    return rng.choice(
        (
            f'root ::= "a"{{{count}}}',
            f'root ::= ("a" | "b"){{0,{count}}} "c"',
            f'root ::= (("a"{{{count}}}){{{rng.choice(COUNTS)}}}){{{rng.choice(COUNTS)}}}',
            f"root ::= {' | '.join(names)}\n" + "\n".join(f'{n} ::= "{n}" root?' for n in names),
            "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)).replace("r0", "root", 1)
            + '\nr40 ::= "a"',
            "root ::= root",
            f'root ::= "{"x" * rng.choice((10, 10_000, 200_000))}"',
            "root ::= " + "(" * 2000 + '"a"' + ")" * 2000,
        )
    )


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A JSON schema."""
    match rng.randrange(8 if depth < 4 else 3):
        case 0:
            return {"type": "string", "pattern": regex(rng)}
        case 1:
            return {"type": "string", "minLength": rng.choice(COUNTS)}
        case 2:
            return {
                "enum": [f"{'v' * rng.choice((1, 200))}{i}" for i in range(rng.choice((2, 3000)))]
            }
        case 3:
            bounds = {"minItems": rng.choice(COUNTS), "maxItems": rng.choice(COUNTS)}
            return {"type": "array", "items": schema(rng, depth + 1), **bounds}
        case 4:
            count = rng.choice((1, 10, 100))
            fields = {f"f{i}": schema(rng, 4) for i in range(count)}
            return {"type": "object", "properties": fields, "required": list(fields)}
        case 5:
            return {"anyOf": [schema(rng, depth + 1) for _ in range(rng.choice((2, 8)))]}
        case 6:
            return {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}] * 2}}, "$ref": "#/$defs/n"}
        case _:
            return {"allOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}


def hostile(rng: random.Random) -> Case:
    """A request with one grammar."""
    message = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"messages": message, "max_tokens": rng.choice((1, 8, 32))}
    match rng.randrange(5):
        case 0:
            body["structured_outputs"] = {"regex": regex(rng)}
        case 1:
            body["structured_outputs"] = {"grammar": ebnf(rng)}
        case 2:
            body["structured_outputs"] = {"json": schema(rng)}
        case 3:
            form = {"name": "n", "schema": schema(rng), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        case _:
            argument = {"type": "string", "pattern": regex(rng)}
            fields = {"type": "object", "properties": {"a": argument}, "required": ["a"]}
            function = {"name": "f", "parameters": fields, "strict": True}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    path, headers = "/v1/chat/completions", {"Content-Type": "application/json"}
    return Case(f"POST {path}", "POST", path, json.dumps(body).encode(), headers)


GRAMMARS = ("structured_outputs", "response_format", "tools", "tool_choice")


def harmless(case: Case) -> Case:
    """The request without its grammar."""
    body = {k: v for k, v in json.loads(case.body).items() if k not in GRAMMARS}
    return Case(case.row, case.method, case.path, json.dumps(body).encode(), case.headers)


def cases(count: int, seed: int, *, plain: bool) -> list[Case]:
    """All cases of a run."""
    rng = random.Random(seed)
    found = [hostile(rng) for _ in range(count)]
    return [harmless(case) for case in found] if plain else found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grammars", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--calm-s", type=float, default=3.0, help="between two waves; 0: no plain ones"
    )
    parser.add_argument("--write", action="store_true", help="keep the report beside this script")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        waves = cases(given.grammars, given.seed, plain=given.plain)
        asyncio.run(fuzz.attack_in_waves(given.attack, waves, given.seed))
        return 0
    command = ["benchmarks.robustness.grammars", f"--grammars={given.grammars}"]
    with server("--kv-memory", "128MiB") as (base, supervisor):
        plain = [*command, "--plain"] if given.calm_s else None  # what it tells is about waits
        work = fuzz.run(
            base, supervisor, command, given.grammars, given.seed, given.calm_s, plain=plain
        )
        report = {"cases": given.grammars, **asyncio.run(work)}
    print(json.dumps(report, indent=1))
    if given.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    bad = report["num_problems"] or report["restarts"] or report["bystander_mismatches"]
    late = (report["bystander_p99_gap_ratio"] or 0.0) > SLOWDOWN
    return 1 if bad or late or report["running_waiting"] != [0, 0] else 0


if __name__ == "__main__":
    sys.exit(main())
