"""`minimind data filter`: remove documents by length, language and as duplicates.

Every removed document is counted.
"""
