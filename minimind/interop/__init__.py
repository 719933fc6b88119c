"""Weights in and out: Hugging Face, Llama, MiniMind2, GGUF. A new format starts in `formats.py`."""
