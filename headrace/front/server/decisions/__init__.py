"""Questions about an input, answered by probabilities: two dialects (OpenAI, System One) over one
way to ask."""
