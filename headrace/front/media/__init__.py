"""Images and video on their way into a prompt: parts of messages, fetching, decoding, processors,
placeholders."""
