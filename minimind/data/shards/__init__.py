"""The format of prepared text: memory-mapped files of token ids and their manifest."""
