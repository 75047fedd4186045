"""Which images, videos and sounds one core has had: their content is sent once, and again only when
the core says that it does not have it any more (MediaGone)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from headrace.base.wire.media import MediaInput
from headrace.front.client.events import Generation, Started

MOST_KNOWN = 4096


def with_media(started: Started, media: Sequence[MediaInput]) -> Started:
    """The same of a prompt with these in it."""
    counts = [(one.num_tokens, one.kind == "audio") for one in media]
    num_audio = sum(tokens for tokens, is_audio in counts if is_audio)
    num_media = sum(tokens for tokens, _ in counts)
    return msgspec.structs.replace(started, num_media=num_media, num_audio=num_audio)


class KnownMedia:
    """Keys of inputs that went to a core, the least recently sent one out first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def unsent(self, generation: Generation) -> Generation:
        """The generation without the content of inputs that the core has had; it has them all from
        now on."""
        media = tuple(
            msgspec.structs.replace(one, rows=b"", unsent=True)
            if one.key in self._keys and not one.embedded
            else one
            for one in generation.media
        )
        for one in media:
            self._keys[one.key] = None
            self._keys.move_to_end(one.key)
        while len(self._keys) > MOST_KNOWN:
            self._keys.popitem(last=False)
        return msgspec.structs.replace(generation, media=media)

    def forget(self) -> None:
        """The core may have none of them."""
        self._keys.clear()
