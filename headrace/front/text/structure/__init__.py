"""What an answer must look like: from schemas, patterns and tools to the node that the core
compiles."""
