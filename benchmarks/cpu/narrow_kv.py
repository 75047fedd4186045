"""What KV caches of 3 and 4 bits would cost the bundled model, by emulation: keys and values are quantized and
dequantized as transformers writes them into its cache.

    python -m benchmarks.cpu.narrow_kv --each 4 --write

nvfp4: e2m1 numbers, an e4m3 scale for 16. `uniform`: whole numbers from a token's smallest value of a head to its
largest. `rotated`: that behind a Hadamard transform of the head with fixed random signs. `turbo`: behind the same
transform, levels that are best for normal values (Lloyd, Max), times the head's root mean square (the first stage of
TurboQuant, Zandieh et al. 2025). Scales are float16. The change of the loss is paired by token, as in perplexity.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from demo.packing import documents
from demo.tasks.draw import TASKS, held_out_conversations
from headrace.bench.report import markdown_table
from headrace.launch.locate import bundled_model

OUT = Path(__file__).resolve().parent / "narrow_kv.json"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Quantize = Callable[[torch.Tensor], torch.Tensor]


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The nearest of sorted levels."""
    return levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Groups of 16."""
    groups = x.unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    inverse = torch.where(scales > 0, 1 / scales, 0)
    return (nearest((groups * inverse).abs(), E2M1) * groups.sign() * scales).flatten(-2)


def uniform(x: torch.Tensor, bits: int) -> torch.Tensor:
    """As the cache "int4"."""
    steps = 2**bits - 1
    low = x.amin(-1, keepdim=True).half().float()
    scale = ((x.amax(-1, keepdim=True) - low) / steps).half().float()
    return ((x - low) / scale.clamp(min=1e-8)).round().clamp(0, steps) * scale + low


def lloyd_max(bits: int) -> torch.Tensor:
    """Levels of least squared error of a normal distribution, by its quantiles."""
    points = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(200_000) + 0.5) / 200_000)
    levels = points[:: len(points) // 2**bits][: 2**bits].sort().values
    for _ in range(60):
        place = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros(len(levels)).index_add_(0, place, points)
        levels = sums / place.bincount(minlength=len(levels))
    return levels


def turbo(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Levels times the root mean square."""
    scale = x.square().mean(-1, keepdim=True).sqrt().half().float()
    return nearest(x / scale.clamp(min=1e-8), levels) * scale


def rotated(quantize: Quantize, width: int) -> Quantize:
    """Behind an orthogonal transform."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(7)) * 2 - 1
    matrix = matrix * signs / math.sqrt(width)
    return lambda x: quantize(x @ matrix.t()) @ matrix


def kinds(width: int) -> dict[str, Quantize]:
    """What is measured, by name."""
    found: dict[str, Quantize] = {"nvfp4": nvfp4}
    for bits in (4, 3):
        levels = lloyd_max(bits)
        found[f"uniform, {bits} bits"] = lambda x, b=bits: uniform(x, b)
        found[f"rotated, {bits} bits"] = rotated(lambda x, b=bits: uniform(x, b), width)
        found[f"turbo, {bits} bits"] = rotated(lambda x, one=levels: turbo(x, one), width)
    return found


class Lossy(transformers.DynamicCache):
    """Keeps what a quantized cache would give back."""

    def __init__(self, quantize: Quantize) -> None:
        super().__init__()
        self._quantize = quantize

    def update(self, key_states, value_states, *rest, **more):
        """See DynamicCache."""
        both = (self._quantize(states) for states in (key_states, value_states))
        return super().update(*both, *rest, **more)


@torch.inference_mode()
def losses(model: torch.nn.Module, found: list, quantize: Quantize | None) -> np.ndarray:
    """Negative log-probability of every learnt token, in order."""
    values = []
    for ids, learnt in found:
        tokens = torch.tensor(ids.tolist())[None]
        cache = transformers.DynamicCache() if quantize is None else Lossy(quantize)
        logits = model(tokens, past_key_values=cache).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        values.append(-chosen[torch.tensor(learnt.tolist())[1:].bool()])
    return torch.cat(values).numpy()


def main() -> None:
    """Prints the table, and stores it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=4, help="conversations per task")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(bundled_model()) / "tokenizer.json"))
    chats = [c for task in TASKS for c in held_out_conversations(task, given.each, seed=1)]
    found = [document for document in documents(tokenizer, chats) if len(document[0]) <= 2048]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_model(), dtype=torch.float32
    ).eval()
    plain, results, rows = losses(model, found, None), {}, []
    for name, quantize in kinds(model.config.head_dim).items():
        change = losses(model, found, quantize) - plain
        results[name] = figures = {
            "loss_change": float(change.mean()),
            "standard_error": float(change.std() / math.sqrt(len(change))),
        }
        rows.append([name, f"{figures['loss_change']:+.5f}", f"{figures['standard_error']:.5f}"])
        print(rows[-1], flush=True)
    print(markdown_table(["kind", "change of the loss", "standard error"], rows))
    if given.write:
        about = {"tokens": len(plain), "each": given.each, "kinds": results}
        OUT.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
