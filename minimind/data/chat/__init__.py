"""Conversations to fine-tune on: their formats, chat templates, and the tokens to train on.

May import `minimind.data.tokenizer` and below. A new format of conversations starts in
`conversations.py`, another treatment of templates in `template.py`.

conversations  parse a record into messages, and messages as canonical text
order          which role may follow which
readable       tokens as text, with special tokens by name and targets marked
rendering      render a template, with the spans the assistant wrote; try it in a child first
sandbox        Jinja as transformers sets it up, without a clock and chance
template       encode a conversation, with the tokens to train on
turns          parse one turn of a conversation
"""
