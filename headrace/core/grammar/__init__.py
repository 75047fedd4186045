"""Structured output: a hook of the scheduler that compiles grammars off the loop and says what may
follow."""
