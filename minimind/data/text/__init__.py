"""Readers of documents from files, folders and globs; rejections have file, line and byte.

A new text format is a reader, a row of `formats.py`, and a line in docs/data.md.
"""
