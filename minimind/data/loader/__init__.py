"""Token shards to micro-batches. The row order is arithmetic, so there is no loader state to save.

The order of rows is defined in `row_order.py`.
"""
