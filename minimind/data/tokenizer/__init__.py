"""Tokenizers: lossless SentencePiece models, tokenizer.json files, and their export.

A new kind of tokenizer is a class of `base.py`, and `load.py` decides which files it reads.
"""
