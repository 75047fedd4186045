"""Embeddings, classification, scoring and reranking over HTTP: several dialects over one way to
pool (engine.py)."""
