"""Cohere's chat dialect: POST /v2/chat."""
