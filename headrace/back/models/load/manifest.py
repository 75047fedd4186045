"""Verifies files against a manifest of SHA-256 digests, in the format of `sha256sum`."""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.base.config.weight_files import confined
from headrace.base.errors import CheckpointError

MAX_MANIFEST_BYTES = 16 << 20
HASH_THREADS = 2


def verify_manifest(manifest: Path, folder: Path) -> int:
    """Checks every file the manifest lists; returns their number. A difference is a CheckpointError
    naming the files.

    Every safetensors and GGUF file of the folder must be listed: an unlisted one is refused too.
    """
    wanted = _read(manifest)
    weights = {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")}
    unlisted = sorted(weights - wanted.keys())
    if unlisted:
        raise CheckpointError(f"{manifest}: these files are not listed: {', '.join(unlisted)}")
    paths = {name: confined(folder, name) for name in wanted}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        raise CheckpointError(f"{manifest}: these files are missing: {', '.join(missing)}")
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = dict(zip(paths, pool.map(_digest, paths.values()), strict=True))
    changed = [name for name, digest in digests.items() if digest != wanted[name]]
    if changed:
        raise CheckpointError(
            f"{manifest}: the SHA-256 of these files differs: {', '.join(changed)}"
        )
    return len(paths)


def _read(manifest: Path) -> dict[str, str]:
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{manifest}: larger than {MAX_MANIFEST_BYTES} bytes")
        lines = manifest.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{manifest}: cannot be read ({type(error).__name__})") from error
    wanted: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        if match is None or match[2] in wanted:
            raise CheckpointError(
                f"{manifest}: line {number} must be '<sha256>  <file>', each file once"
            )
        wanted[match[2]] = match[1].lower()
    if not wanted:
        raise CheckpointError(f"{manifest}: lists no files")
    return wanted


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
