"""Conversations to fine-tune on: their formats, chat templates, and the tokens to train on.

A new format of conversations starts in `conversations.py`, another treatment of templates in
`template.py`.
"""
