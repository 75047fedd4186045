"""HTTP itself: connections, bodies and their limits, keys, errors, event streams; nothing of
conversations."""
