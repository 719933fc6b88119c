"""Tokenizers: SentencePiece without loss, tokenizer.json of others, and their export.

May import `minimind.data.text` and below. Begin in `load.py` for a new kind of tokenizer.

encoder          texts -> ids, long ones in chunks
escaping         U+2581 kept apart from a space
files            the files of a tokenizer
gguf_vocabulary  a SentencePiece model as the vocabulary of a GGUF file
hf_export        a SentencePiece model as a tokenizer.json with the same ids
hf_tokenizer     a tokenizer.json of Hugging Face
load             either kind by its path
long_texts       where a long text can be cut
pieces           what the ids of a vocabulary stand for
sentencepiece    training and use of a SentencePiece model
statistics       bytes per token, unused pieces, texts that do not round-trip
vocabulary       what a vocabulary needs room for
"""
