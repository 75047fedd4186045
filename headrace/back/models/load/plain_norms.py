"""The families whose layers a scale of inputs can be folded into."""

from __future__ import annotations

PLAIN_NORMS = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
"""Their norms are root mean square norms by w as it is stored, each read by the projections of its
branch and, in a mixture, by router and experts."""
