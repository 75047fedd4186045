"""Model text to reasoning, content and tool calls: one engine, four grammars, families as data."""
