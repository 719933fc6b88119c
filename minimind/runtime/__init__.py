"""Processes, signals, exit status, files and locks; object storage and its cache.

`exit.py` ends a run; a new exit status starts in `minimind/errors.py`. A kind of file starts in
`file_kinds.py`, a scheme of URLs in `SCHEMES` of `urls.py` and `LIBRARY_OF` of `filesystem.py`.
"""
