"""`minimind COMMAND`: one module per command parses, calls, prints and returns the exit status.

A new command starts in `main.py`.
"""
