"""Logging of a run: metrics, progress, trackers, traces, MFU. Only rank 0 prints.

A new tracker starts in `trackers.py`, a new value of the step line in `progress.py`.
"""
