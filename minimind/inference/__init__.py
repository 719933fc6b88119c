"""Load a trained model, generate text, and score texts.

May import `minimind.interop` and below. Start in `load_model.py`.

chat           a conversation by a chat template
generate       prompts -> continuations with a key/value cache
lm_eval_tasks  tasks of lm-eval-harness, with the chat template
load_model     load a model and its tokenizer from any source
prompts        read a file of prompts
sampling       sampling settings and logits processors
score          loss of a model on whole texts or conversations
stored_template  whether a model has a chat template, before torch is imported
"""
