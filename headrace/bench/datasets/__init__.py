"""Prompts and tasks that benchmarks and evaluations draw from."""
