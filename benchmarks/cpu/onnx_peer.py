"""onnxruntime-genai as one of the engines (loads: answer.py), from a folder that its own builder has made:

python -m onnxruntime_genai.models.builder -m CHECKPOINT -o FOLDER -p int4 -e cpu    (needs torch, transformers, onnx)
python benchmarks/cpu/onnx_peer.py FOLDER --threads 2
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import onnxruntime_genai
from answer import answer

NUM_IDS = 4000
"""Prompts are of ids below this: every vocabulary here has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    config = onnxruntime_genai.Config(given.model)
    options = {"session_options": {"intra_op_num_threads": given.threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model, rng = onnxruntime_genai.Model(config), np.random.default_rng(0)

    def run(streams: int, num_input: int, num_output: int) -> tuple[float, list[float]]:
        length = num_input + num_output
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            batch_size=streams, min_length=length, max_length=length, do_sample=False
        )
        generator = onnxruntime_genai.Generator(model, params)
        prompts = rng.integers(0, NUM_IDS, (streams, num_input), dtype=np.int32)
        begin, times = time.perf_counter(), []
        generator.append_tokens(prompts)
        for _ in range(num_output):
            generator.generate_next_token()
            times.append(time.perf_counter())
        return times[0] - begin, np.diff(times).tolist()

    answer(run)


if __name__ == "__main__":
    main()
