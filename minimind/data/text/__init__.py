"""Readers: files, folders and globs -> documents, with file, line and byte of what is rejected.

May import `minimind.config` and below. A new text format begins in `documents.py`.

compressed       .gz and .zst as bounded streams
documents        a line, a text or a cell -> a document
inputs           paths -> files, and the segments in which they are read
missing_text     what to do about a record without text
readers          segments -> documents
sample           a bounded sample of a text of any size
sources          sources by name, each with paths and a weight
tables           Parquet files and Hugging Face datasets on disk
"""
