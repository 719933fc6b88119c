"""Checkpoints: written aside, hashed, renamed, verified before reading; elastic.

The format is in `directory.py` and `tensor_files.py`; `saver.py` writes the files, and
`resume.py` reads them. Values that a resume compares are made in `identity.py`, all other fields of
a manifest in `train/loop.py`.
"""
