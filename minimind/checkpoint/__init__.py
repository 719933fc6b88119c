"""Checkpoints: written aside, hashed, renamed, verified before reading; elastic.

The format is in `directory.py` and `tensor_files.py`; `saver.py` writes the files, `resume.py`
goes on from them. A value that a resume compares starts in `identity.py`, any other field of a
manifest in `train/loop.py`.
"""
