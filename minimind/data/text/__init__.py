"""Readers of documents from files, folders and globs; rejections have file, line and byte.

May import `minimind.config` and below. A new text format starts in `documents.py`.

compressed       .gz and .zst as bounded streams
documents        parse a line, a text or a cell into a document
inputs           find files and split them into segments
missing_text     advice for records without text
readers          read the documents of a segment
records          documents that are records of several fields
sample           a bounded sample of a text of any size
sources          sources by name, each with paths and a weight
tables           Parquet files and Hugging Face datasets on disk
"""
