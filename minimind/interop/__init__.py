"""Weights in and out: Hugging Face, Llama, MiniMind2, GGUF.

A new format starts in `export.py` and `tensor_sources.py`.
"""
