"""Writes golden.tensors.gz, what tensorizer makes of the tensors below (it leaves room for a large
index: hence compressed).

    pip install tensorizer==2.12.1
    python -m tests.back.models.load.golden_tensorizer
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import torch

FILE = Path(__file__).with_name("golden.tensors.gz")


def tensors() -> dict[str, torch.Tensor]:
    """What is written."""
    return {
        "model.embed_tokens.weight": (torch.arange(15) / 8).view(5, 3).bfloat16(),
        "model.layers.0.weight": (torch.arange(24) / 7).view(4, 6),
        "model.layers.0.half": (torch.arange(7) / 3).half(),
        "numbers": torch.arange(6, dtype=torch.int64).view(2, 3) - (1 << 40),
        "eight": (torch.arange(8) / 4).view(4, 2).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
    }


def main() -> None:
    """Writes the file."""
    from tensorizer import TensorSerializer

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tensors"
        serializer = TensorSerializer(str(path))
        serializer.write_state_dict(tensors())
        serializer.close()
        FILE.write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))


if __name__ == "__main__":
    main()
