"""Trains the model that hears on one GPU.

python -m demo.hears.train --tokenizer demo/models/speech/tokenizer.json --out runs/hears --seconds 480
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo.hears.model import LETTERS, HearingShape, Whisper
from demo.hears.tokens import SECONDS
from demo.hears.windows import ROW, NoiseShare, Studio, row_of, rows
from demo.ring import Columns, Ring, columns_of
from demo.trainer import Scores, Trainer, add_arguments, run
from headrace.front.media.log_mel import HOP, LEAST_POWER, RANGE, WINDOW, LogMel

LETTERS_SHARE = 0.3
"""Of the loss of the letters' head."""
Batch = tuple[Tensor, ...]


class Ear:
    """Waves int16 [B, N] -> spectrograms [B, M, F] on a device, as LogMel makes them."""

    def __init__(self, shape: HearingShape, device: torch.device) -> None:
        mel = LogMel(shape.num_mel_bins, 100 * SECONDS)
        self._filters_BM = torch.from_numpy(mel.filters_BM).float().to(device)
        self._window = torch.hann_window(WINDOW, device=device)

    def __call__(self, waves: Tensor) -> Tensor:
        padded = F.pad(waves.float() / 32768.0, (WINDOW // 2, WINDOW // 2), mode="reflect")
        frames = padded.unfold(1, WINDOW, HOP)[:, :-1] * self._window
        power = torch.fft.rfft(frames).abs().square()
        log = (power @ self._filters_BM).clamp(min=LEAST_POWER).log10().transpose(1, 2)
        log = torch.maximum(log, log.amax(dim=(1, 2), keepdim=True) - RANGE)
        return (log + 4.0) / 4.0


def to_device(found: Columns, ear: Ear, device: torch.device) -> Batch:
    """Spectrograms, tokens, targets, letters and how many of them."""
    moved = {name: values.to(device, non_blocking=True) for name, values in found.items()}
    whole = (moved[name].long() for name in ("tokens", "targets", "letters", "num_letters"))
    return (ear(moved["wave"]), *whole)


@torch.compiler.disable
def letters_loss(logits_BSL: Tensor, letters: Tensor, counts: Tensor) -> Tensor:
    """Connectionist temporal classification of the letters (Graves et al. 2006)."""
    scores = logits_BSL.float().log_softmax(-1).transpose(0, 1)
    lengths = torch.full_like(counts, scores.shape[0])
    return F.ctc_loss(scores, letters, lengths, counts, blank=LETTERS - 1, zero_infinity=True)


def loss_of(model: Whisper, batch: Batch) -> Tensor:
    """Cross entropy of the learnt tokens, and a share of the letters' loss."""
    spectrograms, tokens, targets, letters, counts = batch
    logits, guesses = model(spectrograms, tokens)
    words = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
    return words + LETTERS_SHARE * letters_loss(guesses, letters, counts)


def held_out_rows(tokenizer: Tokenizer, count: int) -> dict[str, np.ndarray]:
    """Windows that are never trained, of voices that are never heard; with and without noise."""
    studio, rng = Studio("held out", held_out=True), Random(1)
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for language in ("en", "de"):
        for noisy in (False, True):
            while len(kept := found[f"{language}{'_noise' if noisy else ''}"]) < count:
                window = studio.window(language, rng.choice((1, 2, 3)), noisy=noisy)
                row = row_of(window, tokenizer, rng, times=False)
                if row is not None:
                    kept.append(row)
    return {name: np.stack(some) for name, some in found.items() if some}


@torch.no_grad()
def accuracy(
    model: Whisper, held_out: dict[str, np.ndarray], ear: Ear, device: torch.device
) -> Scores:
    """Share of the learnt tokens that are the most likely ones."""
    scores: Scores = {}
    for name, found in held_out.items():
        spectrograms, tokens, targets, _, _ = to_device(columns_of(found), ear, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = model(spectrograms, tokens)[0].argmax(dim=-1)
        learnt = targets >= 0
        scores[name] = round(float((best == targets)[learnt].float().mean()), 4)
        scores[f"{name}_whole"] = round(
            float(((best == targets) | ~learnt).all(dim=1).float().mean()), 4
        )
    return scores


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64, help="windows of a step")
    parser.add_argument("--held-out", type=int, default=64, help="windows of each kind")
    parser.add_argument("--noise-share", type=float, default=0.6, help="of windows, with noise")
    parser.add_argument("--snr-db", type=float, nargs=2, default=(5.0, 30.0), help="voice to noise")
    arguments = parser.parse_args()
    began = time.monotonic()
    low, high = arguments.snr_db
    noisy = NoiseShare(share=arguments.noise_share, snr_db=(low, high))
    ring = Ring(
        ROW, lambda number: rows(f"hears {arguments.seed} {number}", str(arguments.tokenizer), noisy),
        places=8 * arguments.rows, workers=arguments.workers,
    )  # fmt: skip
    held_out = held_out_rows(Tokenizer.from_file(str(arguments.tokenizer)), arguments.held_out)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = HearingShape()
    model, ear = Whisper(shape).to(device), Ear(shape, device)

    def loss(*batch: Tensor) -> Tensor:
        return loss_of(model, batch)

    trainer = Trainer(model, loss, rate=arguments.rate, fall=arguments.fall, plain=arguments.plain)
    run(
        trainer, ring.ahead(arguments.rows), lambda found, plain: to_device(found, ear, device),
        lambda: accuracy(model, held_out, ear, device), arguments, began,
    )  # fmt: skip


if __name__ == "__main__":
    main()
