"""Structured output: a gate of the scheduler that compiles grammars off the loop and says what may follow."""
