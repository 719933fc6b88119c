"""Text -> token shards: cut into work units, encoded by several processes, merged, cached.

Start in `prepare.py` for the cache of a run, in `dataset_folder.py` for `minimind prepare`.
"""
