"""The flags of `vllm serve` and llama-server, for `headrace serve`, `plan` and `render`: each one
that is known here becomes ours, is left out because it asks for what is so anyway or for what the
command has no option for, or is refused with a hint.

Our own flags are never looked up: where a name is ours, it means what docs/CONFIG.md says; of
--quantization vLLM's names of stored formats are left out. What was translated or left out is a
Decision, printed at start with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.base import extensions
from headrace.base.config.resolved import Decision
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.cli.llama_flags import LLAMA
from headrace.cli.other_flag import ONE, OPTIONAL, SEVERAL, OtherFlag
from headrace.cli.vllm_flags import GPU_SHARE, QUANTIZATIONS, VLLM
from headrace.launch.topology import device_facts

OTHERS: Mapping[str, tuple[str, OtherFlag]] = {
    **{flag: ("llama-server", row) for flag, row in LLAMA.items()},
    **{flag: ("vLLM", row) for flag, row in VLLM.items()},
}


_LISTS = ("--served-model-name", "--lora-modules")
"""Flags of ours whose values other servers take as words of their own."""


def translated(argv: Sequence[str], known: Mapping[str, bool]) -> tuple[list[str], list[Decision]]:
    """The command line in our words, and a Decision for each flag that was not ours; ConfigError
    with the hint for one that cannot be honoured. `known`: our flags, and whether a value follows
    each."""
    queue, words, decisions, has_model = list(argv), [], [], False
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and "." not in flag:
            flag = flag.replace("_", "-")
        if flag in _LISTS and flag in known and has_model and not equals:
            words += [flag, ",".join(_taken(queue, SEVERAL))]
        elif flag in known:
            if flag == "--quantization" and (value or "".join(queue[:1])) in QUANTIZATIONS:
                name = value or queue.pop(0)
                words += _quantization(name, decisions)
                continue
            words.append(flag + equals + value)
            if known[flag] and not equals and queue:
                words.append(queue.pop(0))
            has_model = has_model or flag == "--model"
        elif flag.partition(".")[0] not in OTHERS:
            words.append(word)
            has_model = has_model or not word.startswith("-")
        else:
            server, row = OTHERS[flag.partition(".")[0]]  # a field of a JSON value, or none
            values = [value] if equals else _taken(queue, row.arity)
            if row.is_object and "." in flag:
                values = [_part_of_object(flag, values)]
            ours, why = _ours(flag, server, row, values), row.why
            if ours[:1] == ["--quantization"] and ours[1] in QUANTIZATIONS:
                words += _quantization(ours[1], decisions)
                continue
            if ours and ours[0] not in known:
                ours, why = [], "this command has no such option"
            words += ours
            has_model = has_model or "--model" in ours
            why = f"{server}'s flag: {why}"
            decisions.append(Decision(flag, " ".join(values), " ".join(ours) or "left out", why))
    return words, decisions


def _quantization(name: str, decisions: list[Decision]) -> list[str]:
    """Our words for a value of vLLM's --quantization; its Decision is added."""
    ours, why = QUANTIZATIONS[name]
    shown = " ".join(ours) or "left out"
    decisions.append(Decision("--quantization", name, shown, f"vLLM's value: {why}"))
    return list(ours)


def without_gpu(options: Options, notes: list[Decision]) -> tuple[Options, list[Decision]]:
    """On a machine without a GPU, vLLM's share of its memory is left out instead of refused: its
    command lines name one everywhere."""
    if not any(note.field == GPU_SHARE for note in notes):
        return options, notes
    extensions.allow(options.model.extensions)  # one of them may bring the device
    if device_facts(options.device.device).kind != "cpu":
        return options, notes
    device = msgspec.structs.replace(options.device, gpu_memory="auto")
    left_out = {"chosen": "left out", "why": "vLLM's flag: there is no GPU in use"}
    notes = [
        msgspec.structs.replace(note, **left_out) if note.field == GPU_SHARE else note
        for note in notes
    ]
    return msgspec.structs.replace(options, device=device), notes


def _taken(queue: list[str], arity: int | str) -> list[str]:
    """The values of a flag, off the front of the queue."""
    most = {SEVERAL: len(queue), OPTIONAL: 1}.get(str(arity), arity)
    values: list[str] = []
    while queue and len(values) < int(most):
        is_flag = queue[0].startswith("-") and not queue[0].lstrip("-").replace(".", "").isdigit()
        if is_flag:
            break
        values.append(queue.pop(0))
    return values


def _part_of_object(flag: str, values: list[str]) -> str:
    """The object that `FLAG.KEY.KEY VALUE` is a part of, as JSON."""
    try:
        part: object = msgspec.json.decode(" ".join(values))
    except msgspec.DecodeError:
        part = " ".join(values)
    for key in reversed(flag.split(".")[1:]):
        part = {key.replace("-", "_"): part}
    return msgspec.json.encode(part).decode()


def _ours(flag: str, server: str, row: OtherFlag, values: list[str]) -> list[str]:
    if row.arity in (ONE, SEVERAL) and not values:
        raise ConfigError(f"{flag}: a value is needed", field=flag)
    ours = row.words(values)
    if ours is None:
        shown = " ".join([flag, *values])
        raise ConfigError(f"{shown} ({server}'s flag): {row.why}", field=flag)
    return ours
