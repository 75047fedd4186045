"""Which of transformers' architectures that hear or see run natively: every one of its mappings for speech and for
multimodal language models, with what becomes of it here.

python -m benchmarks.architectures [--missing]
"""

from __future__ import annotations

import argparse

from transformers.models.auto import modeling_auto

from headrace.back.models.families import BASES_WITHIN, FALLBACK, WRAPPERS, architecture_of
from headrace.back.models.media_families import WITH_MEDIA

MAPPINGS = {
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "labels of frames (CTC)": "MODEL_FOR_CTC_MAPPING_NAMES",
    "transducers": "MODEL_FOR_RNNT_MAPPING_NAMES",
    "transducers with durations": "MODEL_FOR_TDT_MAPPING_NAMES",
    "text from several media": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
OTHER = {
    "dia": "speaks: sound out",
    "pop2piano": "writes notes, no text",
    "vibevoice": "speaks: sound out",
    "speech-encoder-decoder": "any encoder with any decoder: no architecture of its own",
    "vision-encoder-decoder": "any encoder with any decoder: no architecture of its own",
    "pi0": "moves a robot: actions out",
    "evolla": "reads proteins",
    "diffusion_gemma": "writes blocks by diffusion",
    "cosmos3_omni": "draws: pictures out",
}
"""What is refused for what it does, by `model_type`."""


def state(kind: str, name: str) -> str:
    """native, or refused and why."""
    named = architecture_of({"architectures": [name], "model_type": kind})
    if named.family != FALLBACK:
        return f"native ({named.family})"
    if name in WRAPPERS or name in BASES_WITHIN:
        return "native: its text alone"
    if name.replace("ForConditional", "ThinkerForConditional") in WITH_MEDIA:
        return "native: its thinker"
    return f"refused: {OTHER.get(kind, 'no family is written yet')}"


def rows(missing: bool) -> list[tuple[str, str, str, str]]:
    """Mapping, type, architecture, state."""
    found = []
    for title, mapping in MAPPINGS.items():
        names = getattr(modeling_auto, mapping)
        for kind, one in names.items():
            for name in (one,) if isinstance(one, str) else one:
                what = state(kind, name)
                if not missing or what.startswith("refused"):
                    found.append((title, kind, name, what))
    return found


def main() -> None:
    """Prints the table and its sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="only those that are refused")
    arguments = parser.parse_args()
    title = ""
    table = rows(arguments.missing)
    for mapping, kind, name, what in table:
        if mapping != title:
            title = mapping
            print(f"\n{title}")
        print(f"  {name:48} {kind:28} {what}")
    everything = rows(missing=False)
    native = sum(what.startswith("native") for *_, what in everything)
    print(f"\n{native} of {len(everything)} are native")


if __name__ == "__main__":
    main()
