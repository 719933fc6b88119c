"""Processes, signals, exit status, files and locks.

A new way for a run to end starts in `exit.py`, a new kind of file in `durable_files.py`.
"""
