"""Tokenizers: lossless SentencePiece models, tokenizer.json files, and their export.

May import `minimind.data.text` and below. A new kind of tokenizer starts in `load.py`.

add_special      special tokens appended after the last id
bounds           refuse one that makes gigabytes of a text, or takes hours
encoder          encode texts, long ones in chunks
escaping         keep U+2581 distinct from a space
files            the files of a tokenizer, its chat templates among them
gguf_vocabulary  a SentencePiece model as the vocabulary of a GGUF file
hf_export        a SentencePiece model as a tokenizer.json with the same ids
hf_tokenizer     a tokenizer.json of Hugging Face
load             load either kind by its path
long_texts       split long texts without changing ids
lossless         the text that a tokenizer loses
pattern_trial    short texts for the patterns of a tokenizer.json, under limits
sentencepiece    training and use of a SentencePiece model
statistics       bytes per token, unused pieces, texts that do not round-trip
vocabulary       pieces of a vocabulary, its size limits and special tokens
"""
