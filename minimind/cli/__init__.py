"""`minimind COMMAND`: a module per subject parses, calls, prints and returns the exit status.

A new command starts in `main.py`, which lists them.
"""
