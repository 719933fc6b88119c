"""Token shards to micro-batches. The row order is arithmetic, so there is no loader state to save.

May import `minimind.data.tokenizer` and below. The order of rows is defined in `row_order.py`.

batches              rows -> micro-batches on the device, read ahead by threads
conversation_shards  conversations in rows, with their targets
manifest             manifest.json of a folder of shards, checked when read
mixture              rows of several sources by weight
permutation          shuffles that are computed index by index
row_order            which rows a rank reads at a step
skip_rows            the file of --skip_rows
token_shards         memory-mapped files of token ids
"""
