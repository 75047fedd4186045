"""The OpenAI dialect: chat completions, completions and models."""
