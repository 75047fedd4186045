"""OpenVINO GenAI as one of the engines (loads: answer.py), from a folder in its own format (optimum-intel):

optimum-cli export openvino -m CHECKPOINT --task text-generation-with-past --disable-convert-tokenizer
    --weight-format fp16|int8|int4 (int4: --group-size 32 --ratio 1.0) FOLDER
python benchmarks/cpu/openvino_peer.py FOLDER --threads 2

On a CPU with bf16 matrix units weights in fp16 compute in bf16 (its default).
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import numpy as np
import openvino
import openvino_genai
from answer import answer

NUM_IDS = 4000
"""Prompts are of ids below this: every vocabulary here has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.cache_size = 2048, 32, 1
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        given.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": given.threads}
    )
    rng, ids = np.random.default_rng(0), iter(range(1 << 60))

    def run(streams: int, num_input: int, num_output: int) -> tuple[float, list[float]]:
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = num_output
        wanted.ignore_eos, wanted.do_sample = True, False
        begin, handles = time.perf_counter(), []
        for _ in range(streams):
            prompt = openvino.Tensor(rng.integers(0, NUM_IDS, (1, num_input)))
            handles.append(pipeline.add_request(next(ids), prompt, wanted))
        times: list[float] = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            times.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(times)]
        return times[0] - begin, gaps

    answer(run)


if __name__ == "__main__":
    main()
