"""Text -> tokens -> rows -> micro-batches. Knows no model.

Six packages, each of which may import those before it: `text`, `tokenizer`, `chat`, `loader`,
`prepare`, `quality`.
"""
