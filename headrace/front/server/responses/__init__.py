"""The Responses dialect: its schema, its two functions (to_request, from_events), stored state,
WebSocket."""
