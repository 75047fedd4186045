"""Recurrent layers: mixers whose state does not grow with the context."""
