"""Readers of documents from files, folders and globs; rejections have file, line and byte.

A new text format starts in `FORMS` of `inputs.py` and `_READERS` of `readers.py`.
"""
