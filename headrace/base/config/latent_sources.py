"""Which layer's latents a layer reads, by `kv_source_layers` in config.json (Mistral Large 4).
Here, so that `launch` can ask without torch."""

from __future__ import annotations

from headrace.base.config.hf import ConfigReader


def latent_sources(config: ConfigReader, layers: int) -> list[int]:
    """A layer's own number, or that of one before it that has its own."""
    sources = config.list("kv_source_layers", None, of=int, length=layers)
    if sources is None:
        return list(range(layers))
    for i, source in enumerate(sources):
        if not 0 <= source <= i or sources[source] != source:
            raise config.wrong("kv_source_layers", f"for layer {i} it or one before with its own")
    return list(sources)
