"""Low-rank adapters (LoRA) of a loaded model: reading them from PEFT's folders (peft.py), and
keeping them in host memory and in the slots of the model (store.py)."""
