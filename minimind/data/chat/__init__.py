"""Conversations to fine-tune on: their formats, chat templates, and the tokens to train on.

May import `minimind.data.tokenizer` and below. A new format of conversations starts in
`conversations.py`, another treatment of templates in `template.py`.

conversations  parse a record into messages, and messages as canonical text
order          which role may follow which
readable       tokens as text, with special tokens by name and targets marked
rendering      render a Jinja template, with the spans the assistant wrote
template       encode a conversation, with the tokens to train on
turns          parse one turn of a conversation
"""
