"""Text -> tokens -> rows -> micro-batches. Knows no model.

Four packages, each of which may import those before it: `text`, `tokenizer`, `loader`, `prepare`.
"""
