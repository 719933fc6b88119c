"""A trained model in memory, and text from it.

May import `minimind.interop` and below. Begin in `load_model.py` for where a model comes from.

from_checkpoint  a model and text from a training checkpoint
generate         prompts -> continuations with a key/value cache
load_model       a model and its tokenizer from any source
prompts          a file of prompts
sampling         the choice of the next token
"""
