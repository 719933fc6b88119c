"""Processes, signals, exit status, files and locks; object storage and its cache.

A new way for a run to end starts in `exit.py`, a new kind of file in `durable_files.py`, a scheme
of URLs in `SCHEMES` in `urls.py` and in `filesystem.py`.
"""
