"""Which names and folders of adapters a request may give: adapters come from strangers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from headrace.base.errors import InvalidRequest, NotFound

NAME = re.compile(r"[A-Za-z0-9_.:/@+-]{1,200}")
FILES = ("adapter_config.json", "adapter_model.safetensors")


def check_name(name: str) -> None:
    """InvalidRequest unless requests can name it."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"lora_name: {name!r:.100} is not 1 to 200 letters, digits and _.:/@+-",
            field="lora_name",
        )


def check_folder(folder: str, roots: Sequence[str]) -> None:
    """Only folders below one of `roots` (real paths), whatever links lie on the way, and so are the
    files in them; NotFound where there is none."""
    if not roots:
        raise InvalidRequest(
            "lora_path: adapters may not be loaded while the server runs: it was started without "
            "--lora-folders",
            field="lora_path",
        )
    if not os.path.isabs(folder) or "\0" in folder or not _is_below(folder, roots):
        raise InvalidRequest(
            f"lora_path: {folder!r:.200} is no absolute path below a folder of --lora-folders",
            field="lora_path",
        )
    if not os.path.isdir(folder):
        raise NotFound(f"lora_path: {folder!r:.200} is no folder", field="lora_path")


def _is_below(folder: str, roots: Sequence[str]) -> bool:
    places = (folder, *(os.path.join(folder, file) for file in FILES))
    reals = [os.path.realpath(place) for place in places]
    return all(
        any(real.startswith(root.rstrip(os.sep) + os.sep) for root in roots) for real in reals
    )
