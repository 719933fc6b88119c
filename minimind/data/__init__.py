"""Text -> tokens -> rows -> micro-batches. Knows no model."""
