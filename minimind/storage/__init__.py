"""Object storage: URLs, file systems by URL, retries, a local cache of objects.

A new scheme is a line of `SCHEMES` in `filesystem.py`.
"""
