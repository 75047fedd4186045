"""Processors of transformers whose modules want torchvision, which is not what is compared: they resize by Pillow,
as those do that transformers has for it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Modules imported within find a torchvision that can pad alone, and are forgotten afterwards."""
    before = set(sys.modules)
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in (*names, names[-1] + ".functional")}
    modules[names[-1]].functional = modules[names[-1] + ".functional"]
    functional = vars(modules[names[-1] + ".functional"])
    functional |= {"pad": padded, "InterpolationMode": object}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in {*modules, *(set(sys.modules) - before)}:
            if name in modules or name.startswith("transformers.models."):
                sys.modules.pop(name, None)


def padded(
    images: torch.Tensor,
    padding: Sequence[int],
    fill: Any = 0,
    padding_mode: str = "constant",
) -> torch.Tensor:
    """torchvision's: left, top, right and bottom; `fill`: a number, or one for each channel."""
    left, top, right, bottom = padding
    whole = F.pad(images.float(), (left, right, top, bottom), value=float("nan"))
    values = torch.tensor([fill] * 3 if np.isscalar(fill) else fill).float()
    return torch.where(whole.isnan(), values.view(-1, 1, 1), whole).to(images.dtype)


class ByPillow:
    """Stands for an instance of a processor: its own methods, but Pillow resizes and values stay between 0 and 1."""

    def __init__(self, owner: Any, **attributes: Any) -> None:
        self._owner = owner
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._owner, name)
        static = isinstance(inspect.getattr_static(self._owner, name), staticmethod)
        return value.__get__(self) if callable(value) and not static else value

    def resize(
        self, image: torch.Tensor, size: Any, resample: int | None = None, **more: Any
    ) -> torch.Tensor:
        """The last two dimensions, by Pillow in uint8."""
        unit = image.is_floating_point()
        flat = image.mul(255).round().byte() if unit else image
        flat = flat.reshape(-1, *image.shape[-3:])
        pictures = (Image.fromarray(one.permute(1, 2, 0).numpy()) for one in flat)
        resample = self._owner.resample if resample is None else resample
        small = [
            np.array(one.resize((size.width, size.height), Image.Resampling(int(resample))))
            for one in pictures
        ]
        values = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2)
        values = values.reshape(*image.shape[:-2], size.height, size.width)
        return values.float() / 255 if unit else values

    def rescale_and_normalize(self, images: torch.Tensor, *more: Any) -> torch.Tensor:
        return images.float() / 255

    def pad(self, images: Any, pad_size: Any, **more: Any) -> Any:
        """To the right and below; videos come as a list."""
        if isinstance(images, list):
            return [self.pad(one, pad_size) for one in images]
        right, below = pad_size.width - images.shape[-1], pad_size.height - images.shape[-2]
        whole = padded(images, (0, 0, right, below))
        return list(whole) if whole.ndim == 5 else whole


def preprocessed(
    owner: Any,
    pictures: Sequence[Image.Image],
    *,
    attributes: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """What a processor's class makes of pictures, values between 0 and 1; `attributes`: of its instance."""
    if "videos" not in settings:
        images = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in pictures]
        settings["images"] = images
    known = dict.fromkeys(("image_mean", "image_std", "rescale_factor", "resample"))
    flags = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "disable_grouping"), True)
    settings = {**known, **flags, "return_tensors": "pt", **settings}
    if settings["resample"] is None:
        settings["resample"] = owner.resample
    return owner._preprocess(ByPillow(owner, **attributes or {}), **settings)
