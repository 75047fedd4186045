"""Which names and folders of adapters a request may give, as adapters come from strangers; and
folders in which they are found by name: each folder below one of them that holds an adapter is
served under its own name, and read when a request first names it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence

from headrace.base.errors import HeadraceError, InvalidRequest, NotFound

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""So often the folders are looked at."""
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


class FolderResolver:
    """Looks for adapters below `roots`. `due_at`: when it looks again; None: there are none."""

    def __init__(self, roots: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._roots = tuple(os.path.realpath(root) for root in roots)
        self._clock = clock
        self._refused: set[str] = set()
        self.due_at = clock() if roots else None

    def fresh(self, known: Container[str]) -> Iterator[tuple[str, str]]:
        """(name, folder) of adapters that have come, if it is time to look. Files must lie below
        the roots, whatever links lie on the way; the first root that has a name counts."""
        if self.due_at is None or self._clock() < self.due_at:
            return
        self.due_at = self._clock() + LOOK_S
        for root in self._roots:
            for name in sorted(_folders(root)):
                if name in known:
                    continue
                folder = os.path.join(root, name)
                if self._is_fit(name, folder):
                    yield name, folder

    def _is_fit(self, name: str, folder: str) -> bool:
        if not all(os.path.isfile(os.path.join(folder, file)) for file in FILES):
            return False
        try:
            check_name(name)
            check_folder(folder, self._roots)
        except HeadraceError as error:
            if folder not in self._refused:
                log.warning("%s is not served: %s", folder, error.message)
            self._refused.add(folder)
            return False
        return True


def _folders(root: str) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []
