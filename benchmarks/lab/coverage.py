"""Which text architectures of transformers are served, and why the others are not.

python -m benchmarks.lab.coverage [--try | --write]

Lists every class of transformers' tables for causal, masked and sequence-to-sequence language models and for
classifiers: native by which family, or left to the fallback; with --try a tiny random model of each causal one that
is left is run through the fallback, which says what it lacks.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TABLES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "classifiers": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token classifiers": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
HEAD = "| family | architecture | what it needs |"
LONGEST_S = 300
SMALL: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "d_model": 48, "head_dim": 8},
    **{"decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 80},
    **{"encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 80},
    **{"num_experts": 4, "moe_num_experts": 4, "num_local_experts": 4, "is_decoder": True},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def rows(table: str) -> list[tuple[str, str, str]]:
    """(model type, class, family) of each entry."""
    from transformers.models.auto import modeling_auto

    from headrace.back.models.families import family_of

    found = []
    for kind, named in getattr(modeling_auto, TABLES[table]).items():
        name = named if isinstance(named, str) else named[0]
        family = family_of({"architectures": [name], "model_type": kind, "text_config": {}})
        found.append((kind, name, family))
    return found


def tried(kind: str, name: str) -> str:
    """What the fallback says to a tiny random model: "runs", or why not."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from tests.models.oracle import load_ours, model_spec

    made = CONFIG_MAPPING[kind]
    known = (
        set(inspect.signature(made.__init__).parameters) | set(dir(made)) | set(made.attribute_map)
    )
    known |= set(getattr(made, "__annotations__", {}))
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = made(**{key: value for key, value in SMALL.items() if key in known})
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            model.eval().save_pretrained(folder)
        except Exception as error:  # of many libraries' own kinds; what a tiny model lacks is told
            return f"no tiny model: {type(error).__name__}: {str(error)[:100]}"
        written = json.loads((Path(folder) / "config.json").read_text())
        written["architectures"] = [name]
        (Path(folder) / "config.json").write_text(json.dumps(written))
        try:
            load_ours(model_spec(Path(folder)))
        except Exception as error:  # a refusal, or what should have been one
            return f"{type(error).__name__}: {str(error)[:160]}"
    return "runs"


def apart(kind: str, name: str) -> str:
    """`tried` in a process of its own, of which some would take the memory of a whole model."""
    command = [sys.executable, "-m", "benchmarks.lab.coverage", "--only", kind, name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {LONGEST_S} s: no tiny model"
    return (ended.stdout.strip().splitlines() or ["no answer"])[-1]


def write() -> None:
    """Puts the table of what does not run into docs/MODELS.md, in place of the one there."""
    from headrace.back.models.not_built import missing_table

    page = Path(__file__).parents[2] / "docs" / "MODELS.md"
    before, after = page.read_text().split(HEAD)
    rest = after[after.index("\n\n") + 1 :]
    page.write_text(before + missing_table() + rest)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--try", dest="tries", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs=2, metavar=("TYPE", "CLASS"), help="try this one, here")
    wanted = parser.parse_args()
    if wanted.write:
        write()
        return
    if wanted.only:
        print(tried(*wanted.only))
        return
    from headrace.back.models.not_built import BLOCKED

    for table in TABLES:
        entries = rows(table)
        left = [row for row in entries if row[2] == "transformers"]
        counts = Counter("left" if row in left else "native" for row in entries)
        print(f"{table}: {counts['native']} of {len(entries)} native")
        for kind, name, _ in left:
            said = f": {BLOCKED[name]}" if name in BLOCKED else ""
            if wanted.tries and table == "causal" and name not in BLOCKED:
                said = f": {apart(kind, name)}"
            print(f"  {kind} ({name}){said}", flush=True)


if __name__ == "__main__":
    main()
