"""The text behind a step: which rows were read, and the documents and files they came from.

The commands are `minimind data at` and `data where`. The row order is arithmetic
(`minimind.data.rows.order`), so nothing is recorded while training.
"""
