"""Ollama's dialect: its routes under /api."""
