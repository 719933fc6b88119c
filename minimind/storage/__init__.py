"""Object storage: URLs, file systems by URL, retries.

May import `minimind.runtime` and `minimind.errors` only. A new scheme is a line of `SCHEMES` in
`filesystem.py`.

filesystem       URLs and their file systems; errors that pass, tried again
"""
