"""Token shards to micro-batches.

The row order is arithmetic, so there is no loader state to save; it is defined in `order.py`.
"""
