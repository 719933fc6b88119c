"""Tokenizers: lossless SentencePiece models, tokenizer.json files, and their export.

A new kind of tokenizer starts in `load.py`.
"""
