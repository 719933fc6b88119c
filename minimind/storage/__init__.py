"""Object storage: URLs, file systems by URL, retries, a local cache of objects.

May import `minimind.runtime` and `minimind.errors` only. A new scheme is a line of `SCHEMES` in
`filesystem.py`.

cache_use        which objects of the cache are in use; deletion of others within a bound
download         an object to a verified local file
filesystem       URLs and their file systems; errors that pass, tried again
object_cache     the cache: where an object is, whether it is still what was verified
parallel         threads that an interruption does not wait for
"""
