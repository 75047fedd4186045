"""Mixtures of experts behind the face of a feed-forward: router, experts, their weighted sum."""
