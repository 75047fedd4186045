"""The Anthropic Messages dialect: its schema, its two functions (to_request, from_events), its
shape of errors."""
