"""`minimind data filter`: steps of datatrove that remove documents, count and list them.

`request.py` has the flags, `steps.py` the steps, and `filter.py` runs them in tasks.
"""
