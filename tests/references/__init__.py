"""Independent float32 references, in plain PyTorch, of models that no library has a class for."""
